"""What a ucx transport tells its peers: where its worker is, and what it has registered."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, NewType

import msgspec

from kvferry.core.errors import ConnectError, LayoutError
from kvferry.core.memory import ADDRESS_LIMIT, Region
from kvferry.core.messages import DECODE_ERRORS
from kvferry.drivers.ucx.ucp import MAX_PACKED_KEY, MAX_WORKER_ADDRESS
from kvferry.drivers.ucx.ucp_structs import MEMORY
from kvferry.drivers.ucx_format import FormatError, check_key, check_worker_address

MAX_ADDRESS_BYTES = 4 << 20
MAX_REGIONS = 1 << 14

_DIGEST_BYTES = 16

KeyId = NewType("KeyId", int)
"""Names one registration of one transport; never used again."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Instance = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
WorkerAddress = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_WORKER_ADDRESS)]
Word = Annotated[int, msgspec.Meta(ge=0, le=ADDRESS_LIMIT - 1)]


class UcxRegion(msgspec.Struct, frozen=True, array_like=True):
    """A region, and what UCX needs to reach it."""

    address: Word
    nbytes: Word
    kind: Annotated[str, msgspec.Meta(max_length=16)]
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    key: Word
    packed: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_PACKED_KEY)]


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A process, so that others of its host can see whether it lives: which running kernel, which
    pid namespace, and which one of all that have had that pid."""

    boot: Annotated[str, msgspec.Meta(max_length=64)]
    namespace: Word
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    start_time: Word


class UcxAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address, as msgpack. Fields that a later version adds are ignored.

    Attributes:
        name: the transport's.
        instance: random; a message for another one is not for the transport of this address.
        place: its process.
        ucx: the version of its library, for people; majors must agree.
        worker: of the worker that serves peers, which only UCX can read.
        withdrawn: how many registrations had been undone when this was made.
        regions: what was registered then.
        digest: of what only UCX can read: it does not survive bytes that were changed on the way.
        whole: of all of this, so that a changed one is refused rather than waited for; empty from
            versions before it.
    """

    magic: Literal["kvferry-ucx-1"] = "kvferry-ucx-1"
    name: Name
    instance: Instance
    place: ProcessIdentity
    ucx: Annotated[str, msgspec.Meta(max_length=32)]
    worker: WorkerAddress
    withdrawn: Word
    regions: Annotated[list[UcxRegion], msgspec.Meta(max_length=MAX_REGIONS)]
    digest: bytes = b""
    whole: bytes = b""


_decoder = msgspec.msgpack.Decoder(UcxAddress)


def encode(address: UcxAddress) -> bytes:
    """The bytes that peers get, with their digest."""
    return msgspec.msgpack.encode(
        msgspec.structs.replace(address, digest=_digest(address), whole=_whole(address)),
    )


def decode(data: bytes) -> UcxAddress:
    """Parse untrusted bytes.

    Raises:
        ConnectError: they are no address of this driver.
    """
    if len(data) > MAX_ADDRESS_BYTES:
        raise ConnectError(
            f"an address of {len(data)} bytes; one of the ucx driver has at most "
            f"{MAX_ADDRESS_BYTES}"
        )
    try:
        address = _decoder.decode(data)
    except DECODE_ERRORS as exc:
        raise ConnectError(
            f"not an address of the ucx driver ({exc}): both sides must use the same driver"
        ) from exc
    if address.digest != _digest(address) or address.whole not in (b"", _whole(address)):
        raise ConnectError(
            f"the address of {address.name[:64]} was damaged on its way: its digest is another"
        )
    return address


def regions_of(address: UcxAddress) -> dict[Region, UcxRegion]:
    """The regions of a peer.

    Raises:
        ConnectError: one is not a region.
    """
    try:
        return {
            Region(address=row.address, nbytes=row.nbytes, kind=row.kind, device=row.device): row
            for row in address.regions
        }
    except LayoutError as exc:
        raise ConnectError(f"the address of {address.name} names no valid region: {exc}") from exc


def check_packed(address: UcxAddress) -> None:
    """Refuse what UCX cannot have packed, before UCX reads it.

    Raises:
        ConnectError: the address of the worker or a key is of another form.
    """
    try:
        check_worker_address(address.worker)
        for region in address.regions:
            if region.kind in MEMORY:
                check_key(region.packed, frozenset({MEMORY[region.kind]}))
            else:
                check_key(region.packed)
    except FormatError as exc:
        raise ConnectError(
            f"the address of {address.name} holds what UCX did not pack: {exc}"
        ) from exc


def _digest(address: UcxAddress) -> bytes:
    digest = hashlib.blake2b(address.worker, digest_size=_DIGEST_BYTES)
    for region in address.regions:
        digest.update(region.packed)
    return digest.digest()


def _whole(address: UcxAddress) -> bytes:
    """Of the fields that there were when it was introduced: who adds one leaves it as it is."""
    said = (
        address.name,
        address.instance,
        address.place,
        address.ucx,
        address.worker,
        address.withdrawn,
        address.regions,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=_DIGEST_BYTES).digest()
