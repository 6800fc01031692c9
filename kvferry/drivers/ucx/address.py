"""The address of a ucx transport: how its worker is reached, and the registered regions."""

from __future__ import annotations

import os
from typing import Annotated, Literal, NewType

import msgspec

from kvferry.core.errors import ConnectError
from kvferry.core.transport import procfs
from kvferry.core.transport.addresses import (
    Instance,
    MemoryRow,
    Name,
    Pid,
    Word,
    check_digest,
    decode_address,
    digest_of,
)
from kvferry.drivers.ucx.ucp import MAX_PACKED_KEY, MAX_WORKER_ADDRESS
from kvferry.drivers.ucx.ucp_structs import MEMORY
from kvferry.drivers.ucx_format import ANY_KIND, FormatError, check_key, check_worker_address

MAX_ADDRESS_BYTES = 4 << 20
MAX_REGIONS = 1 << 14

KeyId = NewType("KeyId", int)
"""The number of a registration; a transport never uses a number twice."""

WorkerAddress = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_WORKER_ADDRESS)]
Identity = tuple[Instance, WorkerAddress]
"""What distinguishes a transport from others: its instance, and the worker that serves peers."""


class UcxRegion(MemoryRow, frozen=True, array_like=True):
    """A registered region, as peers see it; ``key`` is its ``KeyId``, ``packed`` is UCX's key."""

    key: Word
    packed: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_PACKED_KEY)]


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a process, so that others on the same host can check whether it still runs."""

    boot: Annotated[str, msgspec.Meta(max_length=64)]  # random, made when the kernel starts
    namespace: Word  # the inode of the pid namespace
    pid: Pid
    start_time: Word  # in clock ticks since boot; another process of this pid has another

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Return the identity of this process."""
        pid = os.getpid()
        return cls(procfs.boot_id(), procfs.pid_namespace(), pid, procfs.start_time(pid) or 0)

    def has_ended(self) -> bool:
        """Return whether the process has ended; False if it cannot be seen from here."""
        if (self.boot, self.namespace) != (procfs.boot_id(), procfs.pid_namespace()):
            return False
        return procfs.start_time(self.pid) != self.start_time


class UcxAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What peers need to reach a transport: a msgpack map. Unknown fields are ignored."""

    magic: Literal["kvferry-ucx-1"] = "kvferry-ucx-1"
    name: Name
    instance: Instance  # random; a ``Hello`` with another one is dropped
    process: ProcessIdentity = msgspec.field(name="place")
    ucx: Annotated[str, msgspec.Meta(max_length=32)]  # version; both sides' majors must be equal
    worker: WorkerAddress  # that serves peers
    withdrawn: Word  # how many regions had been deregistered so far
    regions: Annotated[list[UcxRegion], msgspec.Meta(max_length=MAX_REGIONS)]
    digest: bytes = b""  # of ``worker`` and all packed keys, for earlier builds, which check both
    full_digest: bytes = msgspec.field(name="whole", default=b"")  # of all other fields

    @property
    def identity(self) -> Identity:
        """Instance and worker: an address with another worker leads to another transport."""
        return self.instance, self.worker

    @property
    def constants(self) -> tuple[object, ...]:
        """What never changes for a transport, unlike ``withdrawn`` and ``regions``."""
        return self.identity, self.name, self.process, self.ucx


_decoder = msgspec.msgpack.Decoder(UcxAddress)


def encode(address: UcxAddress) -> bytes:
    """Return an address as the bytes that peers get, with its digests computed."""
    packed = [address.worker, *(region.packed for region in address.regions)]
    digests = {"digest": digest_of(*packed), "full_digest": digest_of(_all(address))}
    return msgspec.msgpack.encode(msgspec.structs.replace(address, **digests))


def decode(data: bytes) -> UcxAddress:
    """Parse an untrusted address; raise ``ConnectError`` if it is another driver's or damaged."""
    address = decode_address("ucx", _decoder, data, MAX_ADDRESS_BYTES)
    check_digest(address.name, address.full_digest, _all(address))  # damaged keys may crash UCX
    return address


def check_packed(address: UcxAddress) -> None:
    """Refuse, by ``ConnectError``, a worker address or keys that are not in UCX's format."""
    try:
        check_worker_address(address.worker)
        for region in address.regions:
            kinds = {MEMORY[region.kind]} if region.kind in MEMORY else ANY_KIND
            check_key(region.packed, kinds)
    except FormatError as exc:
        raise ConnectError(
            f"the address of {address.name} holds what UCX did not pack: {exc}"
        ) from exc


def _all(address: UcxAddress) -> bytes:
    # The fields that existed when the digest was introduced. A later field must stay out of it, or
    # older versions would refuse the address.
    names = ("name", "instance", "process", "ucx", "worker", "withdrawn", "regions")
    return msgspec.msgpack.encode([getattr(address, name) for name in names])
