"""Check worker addresses and memory keys that come from peers, before UCX reads them.

UCX reads beyond the end of bytes that were cut off, and aborts the process if it does not know an
address's version. The formats are those of openucx/ucx, ``src/ucp/wireup/address.c`` (the layouts
at its top and ``ucp_address_unpack``) and ``src/ucp/core/ucp_rkey.c``
(``ucp_ep_rkey_unpack_internal``), from v1.19 to v1.22; with ``UCX_UNIFIED_MODE`` they are others
(see ``is_known``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Container
from dataclasses import dataclass

MAX_ENTRIES = 128
"""UCP_MAX_RESOURCES: the most devices in an address, and the most transports of all together."""
MAX_DOMAINS = 64
ANY_KIND = range(16)
"""The values of ``ucs_memory_type_t``, and some more."""
MAX_KEY_TAIL = 1 + 3 * 64 + 1
"""The most bytes after a key's parts: system device, distances of 64 devices (3 each), end mark."""

_V1, _V2 = 0, 1
_DEBUG_INFO, _UUID, _CLIENT_ID = 1, 2, 4
_LAST, _EMPTY = 0x80, 0x80
_MORE_PATHS, _SYSTEM_DEVICE = 0x40, 0x20
_DOMAIN, _DEVICE_LENGTH, _TRANSPORT_LENGTH = 0x7F, 0x1F, 0x3F
_HAS_ENDPOINTS = 0x40

_LENGTHS = {0x7563: 8, 0x19CF: 2}
"""Bytes of the interface addresses of ``self`` and ``tcp``, by CRC-16 of the name; others vary."""

_ATTRIBUTES_V1 = struct.Struct("<fffI")
_ATTRIBUTES_V2 = struct.Struct("<BBBBHH")
_TINY_NAN = 0xF  # the exponent of a NaN in UCX's 8-bit floats
_MAX_SECONDS = 1.0
_BANDWIDTHS = (1.0, 1e18)


class FormatError(ValueError):
    """Bytes that came from a peer are not in the format that UCX, or NIXL, writes."""


def check_worker_address(data: bytes) -> None:
    """Refuse, by ``FormatError``, bytes that are not the address of a UCX worker."""
    reader = Reader(data)
    version, flags = _header(reader)
    if not flags & _UUID or flags & ~(_DEBUG_INFO | _UUID | _CLIENT_ID):
        raise FormatError(f"its header has the flags {flags:#x}")
    reader.skip(16 if flags & _CLIENT_ID else 8)
    if flags & _DEBUG_INFO:
        reader.skip(reader.byte())
    _devices(reader, version)
    reader.end()


def check_key(data: bytes, kinds: Container[int] = ANY_KIND) -> None:
    """Refuse bytes that are not a memory key as UCX packs it.

    ``kinds`` are the memory kinds to accept, as values of ``ucs_memory_type_t``.
    """
    reader = Reader(data)
    domains = int.from_bytes(reader.take(8), "little")
    kind = reader.byte()
    if kind not in kinds:
        raise FormatError(f"it is to memory of UCX's kind {kind}")
    for _ in range(domains.bit_count()):
        reader.skip(reader.byte())
    if reader.left > MAX_KEY_TAIL:
        raise FormatError(f"{reader.left} bytes follow its parts")


def is_known(address: bytes) -> bool:
    """Return whether a worker address is in this format, such as one of this process's own UCX."""
    try:
        check_worker_address(address)
    except FormatError:
        return False
    return True


@dataclass(slots=True)
class Reader:
    """Reads bytes in order; to read beyond their end raises ``FormatError``."""

    data: bytes
    at: int = 0

    @property
    def left(self) -> int:
        """How many bytes have not been read."""
        return len(self.data) - self.at

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        if nbytes > self.left:
            raise FormatError(f"it ends after {len(self.data)} bytes, within a value")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def skip(self, nbytes: int) -> None:
        """Leave out the next bytes."""
        self.take(nbytes)

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def extended(self, mask: int, version: int) -> tuple[int, int]:
        """Return a byte's value (the bits of ``mask``) and flags, which keep their places."""
        first = self.byte()
        value = first & mask
        # In version 2, a value of which all bits are set stands for the next byte.
        if version == _V2 and value == mask:
            value = self.byte()
        return value, first & ~mask

    def end(self) -> None:
        """Raise ``FormatError`` if bytes are left."""
        if self.left:
            raise FormatError(f"{self.left} bytes follow its end")


def _header(reader: Reader) -> tuple[int, int]:
    first = reader.byte()
    version = first & 0xF
    if version not in (_V1, _V2):
        raise FormatError(f"its version is {version}")
    return version, first >> 4 if version == _V1 else reader.byte()


def _devices(reader: Reader, version: int) -> None:
    domains: list[int] = []
    entries, last = 0, False
    while not last:
        domain, empty = reader.extended(_DOMAIN, version)
        length, flags = reader.extended(_DEVICE_LENGTH, version)
        last = bool(flags & _LAST)
        _extras(reader, flags)
        reader.skip(length)
        if not empty:
            entries += _transports(reader, version)
        domains.append(0 if empty else domain)
        if len(domains) > MAX_ENTRIES or entries > MAX_ENTRIES:
            raise FormatError(f"it has more than {MAX_ENTRIES} devices or transports")
    if not entries:
        raise FormatError("it names no transport")
    if max(domains) >= MAX_DOMAINS:
        raise FormatError(f"it numbers a memory domain {max(domains)}; UCX has {MAX_DOMAINS}")


def _extras(reader: Reader, flags: int) -> None:
    if flags & _MORE_PATHS and reader.byte() < 1:
        raise FormatError("a device has no paths")
    if flags & _SYSTEM_DEVICE:
        reader.skip(1)


def _transports(reader: Reader, version: int) -> int:
    """Read a device's transports, up to ``MAX_ENTRIES`` + 1; return their number."""
    count, last = 0, 0
    while not last:
        name = int.from_bytes(reader.take(2), "little")
        _attributes(reader, version)
        length, flags = reader.extended(_TRANSPORT_LENGTH, version)
        if flags & _HAS_ENDPOINTS:
            raise FormatError("it is an endpoint's")
        if length != _LENGTHS.get(name, length):
            raise FormatError(f"an interface's address has {length} bytes")
        reader.skip(length)
        last = flags & _LAST
        count += 1
        if count > MAX_ENTRIES:
            break
    return count


def _attributes(reader: Reader, version: int) -> None:
    """Refuse a transport whose performance figures are no numbers, or out of bounds."""
    if version == _V2:
        tiny = _ATTRIBUTES_V2.unpack(reader.take(_ATTRIBUTES_V2.size))[:3]
        exponents = [value & 0xF for value in tiny]
        if _TINY_NAN in exponents or not exponents[1]:
            raise FormatError("a transport's figures are not numbers, or it has no bandwidth")
        return
    overhead, bandwidth, latency, _ = _ATTRIBUTES_V1.unpack(reader.take(_ATTRIBUTES_V1.size))
    least, most = _BANDWIDTHS
    sane = all(map(math.isfinite, (overhead, bandwidth, latency)))
    if not (
        sane
        and 0 <= overhead <= _MAX_SECONDS
        and 0 <= latency <= _MAX_SECONDS
        and least <= bandwidth <= most
    ):
        raise FormatError(
            f"a transport's figures are {overhead:g} s, {bandwidth:g} B/s and {latency:g} s"
        )
