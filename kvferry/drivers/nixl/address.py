"""The address of a NIXL transport: its agent's metadata, and the registered memory.

A peer's metadata is checked before NIXL reads it. Its format, the same from 1.0 to 1.5, is that of
ai-dynamo/nixl: ``src/utils/serdes/serdes.cpp``, ``getLocalMD`` of ``src/core/nixl_agent.cpp``,
``serializeSections`` of ``src/infra/nixl_memory_section.cpp`` and ``nixlDescList`` of
``src/infra/nixl_descriptors.cpp``. Each field is a tag, the length of the value, the value, and
``|``. The values of NIXL's UCX backend are addresses and keys that UCX packed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from kvferry.core.memory import Region
from kvferry.core.transport.addresses import (
    MemoryRow,
    Name,
    Word,
    check_digest,
    decode_address,
    digest_of,
)
from kvferry.drivers.nixl.agents import RegisteredSpan
from kvferry.drivers.ucx_format import FormatError, Reader, check_key, check_worker_address

MAX_ADDRESS_BYTES = 1 << 20
MAX_REGIONS = 1 << 14

UCX = "UCX"
MAX_SECTIONS = 64
_START = b"nixlSerDes|"
_BAR = b"|"
_SIZE = struct.Struct("<Q")
_DESCRIPTOR_BYTES = 24
"""The bytes of a descriptor's address, length and device; the backend's key follows them."""
_SEGMENTS = range(7)
"""The values of ``nixl_mem_t`` (kinds of memory), and some more for kinds to come."""


class Range(MemoryRow, frozen=True, array_like=True):
    """A range of the peer's memory: a registered region, or a span (see ``agents``)."""

    key: Word = 0  # of a span: a peer sees by it that it was registered anew


_Ranges = Annotated[list[Range], msgspec.Meta(max_length=MAX_REGIONS)]


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a NIXL transport, as msgpack. Fields of later versions are ignored."""

    magic: Literal["kvferry-nixl-1"] = "kvferry-nixl-1"
    name: Name  # also of the NIXL agent
    backend: Name  # both sides must have the same
    metadata: bytes
    # Metadata with another digest is refused before NIXL reads it: NIXL drops a connected peer if
    # it cannot read new metadata of that peer.
    digest: bytes
    spans: _Ranges
    regions: _Ranges  # each lies in one span


_decoder = msgspec.msgpack.Decoder(NixlAddress)


def encode(
    *,
    name: str,
    backend: str,
    metadata: bytes,
    spans: Iterable[RegisteredSpan],
    regions: Iterable[Region],
) -> bytes:
    """Return the address of a transport, encoded for its peers."""
    return msgspec.msgpack.encode(
        NixlAddress(
            name=name,
            backend=backend,
            metadata=metadata,
            digest=digest_of(metadata),
            spans=[_range(span.whole, span.key) for span in spans],
            regions=[_range(region) for region in regions],
        )
    )


def decode(data: bytes) -> NixlAddress:
    """Parse an untrusted address, but not its metadata; raise ``ConnectError`` if it is damaged."""
    address = decode_address("nixl", _decoder, data, MAX_ADDRESS_BYTES)
    check_digest(address.name, address.digest, address.metadata)
    return address


def _range(region: Region, key: int = 0) -> Range:
    return Range(region.address, region.nbytes, region.kind, region.device, key)


def parsed(data: bytes) -> tuple[str, bytes]:
    """Parse untrusted metadata, UCX's values included, or raise ``FormatError``.

    Return the agent's name, and how its backend is reached, the same for as long as it lives.
    """
    reader = _Tagged(data)
    reader.expect(_START)
    agent = reader.text(b"Agent")
    reader.count(b"Conns", 1, 1)  # the driver's agents have one backend
    backend, connection = reader.text(b"t"), reader.value(b"c")
    if backend == UCX:
        check_worker_address(connection)
    if not connection:
        raise FormatError(f"backend {backend!r} has no connection")
    if reader.value(b"") != b"MemSection":
        raise FormatError("it has no section of memory")
    for _ in range(reader.count(b"nixlSecElms", 0, MAX_SECTIONS)):
        _section(reader)
    reader.end()
    return agent, connection


def _section(reader: _Tagged) -> None:
    backend = reader.text(b"bknd")
    if reader.value(b"nixlDList") != b"nixlSDList":
        raise FormatError("a section has no list of descriptors")
    segment = reader.value(b"t")
    if len(segment) != 4 or int.from_bytes(segment, "little") not in _SEGMENTS:
        raise FormatError("a section is of no kind of memory")
    # Each descriptor takes at least its length field and its fixed part.
    for _ in range(reader.count(b"n", 1, reader.left // (_SIZE.size + _DESCRIPTOR_BYTES))):
        descriptor = reader.value(b"")
        if len(descriptor) < _DESCRIPTOR_BYTES:
            raise FormatError(f"a descriptor has {len(descriptor)} bytes")
        if backend == UCX:
            check_key(descriptor[_DESCRIPTOR_BYTES:])


class _Tagged(Reader):
    """Reads tagged values."""

    def expect(self, wanted: bytes) -> None:
        if self.take(len(wanted)) != wanted:
            raise FormatError(f"byte {self.at - len(wanted)} does not begin with {wanted!r}")

    def value(self, tag: bytes) -> bytes:
        self.expect(tag)
        (nbytes,) = _SIZE.unpack(self.take(_SIZE.size))
        found = self.take(nbytes)
        self.expect(_BAR)
        return found

    def text(self, tag: bytes) -> str:
        try:
            found = self.value(tag).decode()
        except UnicodeDecodeError as exc:
            raise FormatError(f"the value of {tag!r} is no text") from exc
        if not found:
            raise FormatError(f"the value of {tag!r} is empty")
        return found

    def count(self, tag: bytes, least: int, most: int) -> int:
        found = self.value(tag)
        number = int.from_bytes(found, "little")
        if len(found) != _SIZE.size or not least <= number <= most:
            raise FormatError(f"the value of {tag!r} is {number}; {least} to {most} can be")
        return number
