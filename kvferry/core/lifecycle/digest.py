"""A hash of all that decides the content of a request's pages: tokens, LoRA, cache salt.

See docs/protocol.md, "Identities".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

DIGEST_BYTES = 16


def digest(token_ids: Sequence[int] | np.ndarray, *extra: object) -> bytes:
    """Return one BLAKE2b digest of token ids (as little-endian int64) and ``extra`` (as msgpack).

    Args:
        token_ids: ids of the prompt's tokens that the pages cover, in order.
        extra: everything else that changes the pages' content (LoRA, multimodal hashes, cache
            salt), in the same order on both engines. Pass ``None`` for a value that is absent.

    Returns:
        16 bytes.
    """
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    state.update(np.asarray(token_ids, dtype="<i8").tobytes())
    state.update(msgspec.msgpack.encode(extra, order="deterministic"))
    return state.digest()
