"""Reads by messages, for connections over which UCX cannot reach the peer's memory.

UCX would emulate such access: the peer's UCX checks no address, and if the connection has ended
before it answers, since the requesting process was killed, UCX ends the peer's process (1.22:
"Fatal: unexpected error"). So the driver turns emulation off, and sends ``Fetch``. The server
checks every address; once it has closed a connection, it drops what arrives on it later.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvferry.core.memory import CPU, Region, U64Array
from kvferry.drivers.ucx.address import KeyId
from kvferry.drivers.ucx.messages import MAX_RELAY_BYTES, MAX_RELAY_ROWS, ROW_BYTES

RegionsByKey = Mapping[KeyId, Region]
"""The registered regions of a transport, by the keys of their registrations."""

NIC_TRANSPORTS = ("rc", "dc", "ugni")
"""Name prefixes of the UCX transports by which NICs read the peer's memory."""

NATIVE_TRANSPORTS = ("cma", "knem", "xpmem", *NIC_TRANSPORTS)
"""Name prefixes of the UCX transports that reach CPU memory without the peer's help."""

_NONE: U64Array = np.empty(0, np.uint64)


def reaches_cpu_memory(transports: frozenset[str]) -> bool:
    """Return whether UCX moves the bytes of CPU memory without the peer's help.

    Else they go by messages. Whether it reaches other memory does not follow from the names of
    transports (a NIC's driver may not know a GPU's memory): the first read shows it.
    """
    return any(name.startswith(NATIVE_TRANSPORTS) for name in transports)


def consecutive(base: int, nbytes: U64Array) -> U64Array:
    """Return the (n,) addresses of adjacent ranges of (n,) lengths, the first at ``base``."""
    return np.cumsum(nbytes) - nbytes + np.uint64(base)


def build_rows(keys: U64Array, addresses: U64Array, nbytes: U64Array) -> U64Array:
    """Return the rows, (n, 3) uint64, that name ranges of a server in a ``Fetch``."""
    return np.stack([keys, addresses, nbytes], axis=1)


def check_rows(data: bytes, regions: RegionsByKey) -> tuple[str, U64Array, U64Array]:
    """Check rows; return the reason for a refusal, or "", and the addresses and lengths."""
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
