"""Reading and writing by messages, where UCX has no way of its own into the peer's memory.

UCX would emulate one: the peer's UCX carries out what arrives, without a look at the address, and
answers; and if the connection has ended by then, as it has when who asked was killed, UCX ends the
peer's process (1.22: "Fatal: unexpected error", of ``ucp_put_handler`` and of its counterpart for
reads). So the driver turns emulation off and sends bytes itself. The host looks at every address,
and knows when it drops what arrives late.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np

from kvferry.core.memory import CPU, Region, U64Array
from kvferry.drivers.ucx.address import KeyId
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, MAX_RELAY_ROWS, ROW_BYTES

Regions = Mapping[KeyId, Region]
Move = Callable[[U64Array, U64Array, U64Array], None]
"""As ``Poster.move``."""

NATIVE = {
    CPU: ("cma", "knem", "xpmem", "rc", "dc", "ugni"),
    "cuda": ("rc", "dc", "cuda_ipc"),
}
"""By memory kind, how the names begin of UCX's transports that reach it by themselves."""

_NONE: U64Array = np.empty(0, np.uint64)


def reached_natively(transports: frozenset[str], kinds: frozenset[str]) -> bool:
    """Whether UCX needs no help of the peer's to move bytes between memory of some kinds."""
    return all(any(name.startswith(NATIVE.get(kind, ())) for name in transports) for kind in kinds)


def copied(transports: frozenset[str]) -> bool:
    """Whether what moves bytes of CPU memory is this process, and not a device."""
    return "cma" in transports


def lined_up(base: int, nbytes: U64Array) -> U64Array:
    """(n,) addresses: where ranges begin that lie one behind the other from an address on."""
    return np.cumsum(nbytes) - nbytes + np.uint64(base)


def rows_of(keys: U64Array, addresses: U64Array, nbytes: U64Array) -> U64Array:
    """(n, 3): what a message names of the host's memory."""
    return np.stack([keys, addresses, nbytes], axis=1)


def store(rows: int, body: int, nbytes: int, regions: Regions, move: Move) -> str:
    """Write what a stranger sends, all of it or nothing; why nothing, or an empty string.

    Args:
        rows: how many he says that there are.
        body: the address of what came with his message, and ``nbytes``: how much that is.
        regions: of this process.
        move: copies.
    """
    named = ROW_BYTES * rows
    if nbytes < named:
        return f"a store of {nbytes} bytes, and {rows} rows"
    refusal, addresses, lengths = checked(ctypes.string_at(body, named), regions)
    if not refusal and int(lengths.sum()) != nbytes - named:
        refusal = f"a store of {nbytes - named} bytes for {int(lengths.sum())}"
    if not refusal:
        move(addresses, lined_up(body + named, lengths), lengths)
    return refusal


def checked(data: bytes, regions: Regions) -> tuple[str, U64Array, U64Array]:
    """What is the matter with a stranger's rows; their addresses and lengths."""
    if len(data) % ROW_BYTES or len(data) > ROW_BYTES * MAX_RELAY_ROWS:
        return f"rows of {len(data)} bytes", _NONE, _NONE
    keys, addresses, lengths = np.frombuffer(data, np.uint64).reshape(-1, 3).T.copy()
    # The longest first: the sum of any lengths may be beyond a word, and look small.
    if lengths.max(initial=0) > MAX_RELAY_BYTES or lengths.sum() > MAX_RELAY_BYTES:
        return f"too many bytes at once; at most {MAX_RELAY_BYTES}", _NONE, _NONE
    for key in {*keys.tolist()}:
        region = regions.get(KeyId(key))
        if region is None:
            return "a region has been deregistered", _NONE, _NONE
        mine = keys == key
        # What lies before a region is far behind it, in words.
        start = addresses[mine] - np.uint64(region.address)
        outside = (start > region.nbytes) | (start + lengths[mine] > region.nbytes)
        if region.kind != CPU or outside.any():
            first = int(addresses[mine][outside.argmax()])
            return f"bytes from {first:#x} on leave {region}", _NONE, _NONE
    return "", addresses, lengths
