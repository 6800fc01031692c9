"""Reading and writing by messages, where UCX has no way of its own into the peer's memory.

UCX would emulate one: the peer's UCX carries out what arrives, without a look at the address, and
answers; and if the connection has ended by then, as it has when who asked was killed, UCX ends the
peer's process (1.22: "Fatal: unexpected error", of ``ucp_put_handler`` and of its counterpart for
reads). So the driver turns emulation off and sends bytes itself. The host looks at every address,
and knows when it drops what arrives late.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Mapping

import numpy as np

from kvferry.core.memory import CPU, Region, U64Array
from kvferry.drivers.ucx.address import KeyId
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, MAX_RELAY_ROWS, Fetch, Store

NATIVE = {
    CPU: ("cma", "knem", "xpmem", "rc", "dc", "ugni"),
    "cuda": ("rc", "dc", "cuda_ipc"),
}
"""By memory kind, how the names begin of UCX's transports that reach it by themselves."""


def reached_natively(transports: frozenset[str], kinds: frozenset[str]) -> bool:
    """Whether UCX needs no help of the peer's to move bytes between memory of some kinds."""
    return all(any(name.startswith(NATIVE.get(kind, ())) for name in transports) for kind in kinds)


def gathered(addresses: list[int], lengths: list[int]) -> bytes:
    """The bytes of some ranges of this process's memory, one after the other."""
    return b"".join(map(ctypes.string_at, addresses, lengths))


def scatter(data: bytes, addresses: list[int], lengths: list[int]) -> None:
    """Write bytes to ranges of this process's memory, which they fill exactly."""
    source = np.frombuffer(data, np.uint8).ctypes.data
    starts = source + np.cumsum([0, *lengths[:-1]])
    # The loop itself runs in C: map, consumed by a deque that keeps nothing.
    collections.deque(map(ctypes.memmove, addresses, starts.tolist(), lengths), maxlen=0)


def rows_of(keys: U64Array, addresses: U64Array, lengths: U64Array) -> bytes:
    """(n, 3) uint64, as bytes: what a message names of the host's memory."""
    return np.stack([keys, addresses, lengths], axis=1).tobytes()


def store(message: Store, regions: Mapping[KeyId, Region]) -> str:
    """Write what a stranger sends, all of it or nothing; why nothing, or an empty string."""
    refusal, addresses, lengths = _checked(message.rows, regions)
    if not refusal and sum(lengths) != len(message.data):
        refusal = f"a store of {len(message.data)} bytes for {sum(lengths)}"
    if not refusal:
        scatter(message.data, addresses, lengths)
    return refusal


def fetch(message: Fetch, regions: Mapping[KeyId, Region]) -> tuple[str, bytes]:
    """Why a stranger gets nothing, or an empty string; and all the bytes that he asks for."""
    refusal, addresses, lengths = _checked(message.rows, regions)
    return (refusal, b"") if refusal else ("", gathered(addresses, lengths))


def _checked(data: bytes, regions: Mapping[KeyId, Region]) -> tuple[str, list[int], list[int]]:
    """What is the matter with a stranger's rows; their addresses and lengths."""
    if len(data) % 24 or len(data) > 24 * MAX_RELAY_ROWS:
        return f"rows of {len(data)} bytes", [], []
    rows = np.frombuffer(data, np.uint64).reshape(-1, 3)
    keys, addresses, lengths = (column.tolist() for column in rows.T)
    if sum(lengths) > MAX_RELAY_BYTES:
        return f"{sum(lengths)} bytes at once; at most {MAX_RELAY_BYTES}", [], []
    for key, address, nbytes in zip(keys, addresses, lengths, strict=True):
        region = regions.get(KeyId(key))
        if region is None:
            return "a region has been deregistered", [], []
        if region.kind != CPU or address < region.address or address + nbytes > region.end:
            return f"{nbytes} bytes at {address:#x} leave {region}", [], []
    return "", addresses, lengths
