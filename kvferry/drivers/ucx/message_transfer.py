"""Reads and writes by messages, where UCX has no way of its own into the peer's memory.

UCX would emulate one: the peer's UCX carries out what arrives without checking the address, and
answers. If the connection has ended by then, as it has when the process that asked was killed, UCX
ends the peer's process (1.22: "Fatal: unexpected error", in ``ucp_put_handler`` and in its
counterpart for reads). So the driver turns emulation off and sends the bytes itself. The server
checks every address, and knows when it drops what arrives late.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np

from kvferry.core.memory import CPU, Region, U64Array
from kvferry.drivers.ucx.address import KeyId
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, MAX_RELAY_ROWS, ROW_BYTES

RegionsByKey = Mapping[KeyId, Region]
CopyRanges = Callable[[U64Array, U64Array, U64Array], None]
"""Copies ranges of memory, as ``Poster.copy``."""

NATIVE_TRANSPORTS = {
    CPU: ("cma", "knem", "xpmem", "rc", "dc", "ugni"),
    "cuda": ("rc", "dc", "cuda_ipc"),
}
"""By memory kind: how the names of UCX's transports begin that reach it without the peer's help."""

_NONE: U64Array = np.empty(0, np.uint64)


def reached_natively(transports: frozenset[str], kinds: frozenset[str]) -> bool:
    """Return whether UCX can move bytes between some kinds of memory without the peer's help.

    Args:
        transports: UCX's names of the transports of a connection.
        kinds: the memory kinds of both sides.
    """
    return all(
        any(name.startswith(NATIVE_TRANSPORTS.get(kind, ())) for name in transports)
        for kind in kinds
    )


def copied_by_cpu(transports: frozenset[str]) -> bool:
    """Return whether this process copies bytes of CPU memory itself, rather than a device."""
    return "cma" in transports


def consecutive(base: int, nbytes: U64Array) -> U64Array:
    """Return the (n,) addresses of ranges that lie one behind the other.

    Args:
        base: the address of the first.
        nbytes: (n,) the lengths of the ranges.
    """
    return np.cumsum(nbytes) - nbytes + np.uint64(base)


def build_rows(keys: U64Array, addresses: U64Array, nbytes: U64Array) -> U64Array:
    """Return the (n, 3) rows with which a message names ranges of the server's memory."""
    return np.stack([keys, addresses, nbytes], axis=1)


def apply_store(
    rows: int, body: int, nbytes: int, regions: RegionsByKey, copy_ranges: CopyRanges
) -> str:
    """Write the bytes of a peer's message into registered memory: all of them, or none.

    Args:
        rows: how many rows the peer says that there are.
        body: the address of the message's body: the rows, then the bytes.
        nbytes: the length of the body.
        regions: the registered regions of this process.
        copy_ranges: copies.

    Returns:
        Why nothing was written, or an empty string.
    """
    head = ROW_BYTES * rows
    if nbytes < head:
        return f"a store of {nbytes} bytes, and {rows} rows"
    refusal, addresses, lengths = check_rows(ctypes.string_at(body, head), regions)
    if not refusal and int(lengths.sum()) != nbytes - head:
        refusal = f"a store of {nbytes - head} bytes for {int(lengths.sum())}"
    if not refusal:
        copy_ranges(addresses, consecutive(body + head, lengths), lengths)
    return refusal


def check_rows(data: bytes, regions: RegionsByKey) -> tuple[str, U64Array, U64Array]:
    """Check the rows of a peer's message against the registered regions.

    Args:
        data: the rows, each of ``ROW_BYTES``.
        regions: the registered regions of this process.

    Returns:
        Why they are refused, or an empty string; then the (n,) addresses and (n,) lengths that they
        name, which are empty if they are refused.
    """
    if len(data) % ROW_BYTES or len(data) > ROW_BYTES * MAX_RELAY_ROWS:
        return f"rows of {len(data)} bytes", _NONE, _NONE
    keys, addresses, lengths = np.frombuffer(data, np.uint64).reshape(-1, 3).T.copy()
    # The longest first: the sum of any lengths may overflow 64 bits, and look small.
    if lengths.max(initial=0) > MAX_RELAY_BYTES or lengths.sum() > MAX_RELAY_BYTES:
        return f"too many bytes at once; at most {MAX_RELAY_BYTES}", _NONE, _NONE
    for key in {*keys.tolist()}:
        region = regions.get(KeyId(key))
        if region is None:
            return "a region has been deregistered", _NONE, _NONE
        of_region = keys == key
        # An address below the region wraps around, and so is far behind its end.
        offset = addresses[of_region] - np.uint64(region.address)
        outside = (offset > region.nbytes) | (offset + lengths[of_region] > region.nbytes)
        if region.kind != CPU or outside.any():
            first = int(addresses[of_region][outside.argmax()])
            return f"bytes from {first:#x} on leave {region}", _NONE, _NONE
    return "", addresses, lengths
