"""Reads and writes by messages, for connections over which UCX cannot reach the peer's memory.

UCX would emulate such access: the peer's UCX carries out requests without checking the addresses,
and answers. If the connection has ended by then, because the requesting process was killed, UCX
ends the peer's process (1.22: "Fatal: unexpected error", in ``ucp_put_handler`` and in its
counterpart for reads). So the driver turns emulation off, and its client sends ``Store`` and
``Fetch`` messages. The server, whose memory is read and written, checks every address; once it has
closed a connection, it drops messages that arrive on it later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np

from kvferry.core.memory import CPU, Region, U64Array
from kvferry.drivers.ucx.address import KeyId
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, MAX_RELAY_ROWS, ROW_BYTES

RegionsByKey = Mapping[KeyId, Region]
"""The registered regions of a transport, by the keys of their registrations."""

CopyRanges = Callable[[U64Array, U64Array, U64Array], None]
"""Copies ranges of memory, as ``Poster.copy``."""

NIC_TRANSPORTS = ("rc", "dc", "ugni")
"""Name prefixes of the UCX transports by which NICs read and write the peer's memory."""

NATIVE_TRANSPORTS = ("cma", "knem", "xpmem", *NIC_TRANSPORTS)
"""Name prefixes of the UCX transports that reach CPU memory without the peer's help."""

_NONE: U64Array = np.empty(0, np.uint64)


def needs_messages(transports: frozenset[str], kinds: frozenset[str]) -> bool:
    """Return whether bytes go by messages, since UCX cannot move them without the peer's help.

    Messages carry CPU memory only, so for other memory UCX always has to move the bytes itself.
    Whether UCX can do so does not follow from the names of the transports: a NIC's driver may not
    know a GPU's memory, and UCX may have turned reads off. UCX says so when the first read fails.

    Args:
        transports: UCX's names of the connection's transports.
        kinds: the memory kinds of all regions, local and remote, that take part.
    """
    return kinds == {CPU} and not any(name.startswith(NATIVE_TRANSPORTS) for name in transports)


def copied_by_cpu(transports: frozenset[str]) -> bool:
    """Return whether this process copies the bytes of CPU memory itself, by cma.

    Args:
        transports: UCX's names of the connection's transports.
    """
    return "cma" in transports


def consecutive(base: int, nbytes: U64Array) -> U64Array:
    """Return the addresses of n adjacent ranges.

    Args:
        base: the address of the first range.
        nbytes: (n,) uint64, the length of each range in bytes.

    Returns:
        (n,) uint64, the address of each range.
    """
    return np.cumsum(nbytes) - nbytes + np.uint64(base)


def build_rows(keys: U64Array, addresses: U64Array, nbytes: U64Array) -> U64Array:
    """Return the rows that name n ranges of the server's memory in a ``Store`` or ``Fetch``.

    Args:
        keys: (n,) uint64, the key of the registration that each range lies in.
        addresses: (n,) uint64, the address of each range in the server's process.
        nbytes: (n,) uint64, the length of each range in bytes.

    Returns:
        (n, 3) uint64: key, address and length of each range.
    """
    return np.stack([keys, addresses, nbytes], axis=1)


def apply_store(
    rows: int, body: int, nbytes: int, regions: RegionsByKey, copy_ranges: CopyRanges
) -> str:
    """Write the bytes of a client's ``Store`` into registered memory: all of them, or none.

    Args:
        rows: how many rows the body begins with, according to the client.
        body: the address of the message's body: the rows, then the bytes to write.
        nbytes: the length of the body in bytes.
        regions: the registered regions of this transport.
        copy_ranges: the function that copies the bytes.

    Returns:
        Why nothing was written; an empty string if all bytes were written.
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
    """Check the rows of a client's message against the registered regions.

    Args:
        data: the n rows, ``ROW_BYTES`` each.
        regions: the registered regions of this transport.

    Returns:
        Why the rows are refused, or an empty string; then the addresses and the lengths in bytes of
        the ranges, each (n,) uint64, or (0,) if the rows are refused.
    """
    if len(data) % ROW_BYTES or len(data) > ROW_BYTES * MAX_RELAY_ROWS:
        return f"rows of {len(data)} bytes", _NONE, _NONE
    keys, addresses, lengths = np.frombuffer(data, np.uint64).reshape(-1, 3).T.copy()
    # Check the longest range before the sum: the sum of unchecked lengths could overflow 64 bits
    # and look small.
    if lengths.max(initial=0) > MAX_RELAY_BYTES or lengths.sum() > MAX_RELAY_BYTES:
        return f"too many bytes at once; at most {MAX_RELAY_BYTES}", _NONE, _NONE
    for key in {*keys.tolist()}:
        region = regions.get(KeyId(key))
        if region is None:
            return "a region has been deregistered", _NONE, _NONE
        of_region = keys == key
        # The offset of an address below the region wraps around to a very large number.
        offset = addresses[of_region] - np.uint64(region.address)
        outside = (offset > region.nbytes) | (offset + lengths[of_region] > region.nbytes)
        if region.kind != CPU or outside.any():
            first = int(addresses[of_region][outside.argmax()])
            return f"bytes from {first:#x} on leave {region}", _NONE, _NONE
    return "", addresses, lengths
