"""Try addresses with a valid digest and hostile contents on a process, which must survive them."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.transport import PeerId
from kvferry.core.transport.addresses import digest_of
from kvferry.core.transport.copies import copies_between
from kvferry.drivers.nixl import address as nixl
from kvferry.drivers.nixl.address import parsed
from kvferry.drivers.ucx import address as ucx
from kvferry.drivers.ucx import messages
from kvferry.drivers.ucx_format import FormatError, check_key, check_worker_address
from kvferry.testing.peer_process import PeerServer
from kvferry.testing.peers import Process
from tests.faults.mutations import Mutator

FACTORIES = {
    "ucx": "kvferry.drivers.ucx:UcxTransport",
    "nixl": "kvferry.drivers.nixl:NixlTransport",
    "loopback": "kvferry.drivers.loopback:LoopbackTransport",
}
OPTIONS: dict[str, dict[str, object]] = {"ucx": {"connect_seconds": 0.15}}
COUNT = int(os.environ.get("KVFERRY_HOSTILE", "100"))
"""Addresses that a test tries."""
ADDRESSES_PER_PROCESS = 500
"""Addresses tried on one process: in NIXL, connections leave file descriptors behind."""
READ_SECONDS = 0.2
MAX_DRAWS = 200
SETTLE_SECONDS = 0.01
EXTREMES = (0, 1, 2, 0x1F, 0x20, 0x3F, 0x40, 0x7F, 0x80, 0xFE, 0xFF)
WORDS = (0, 1, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


class BlobMutator(Mutator):
    """Makes malformed blobs from valid ones. Only the C library reads the contents of a blob."""

    def changed(self, right: bytes, check: Callable[[bytes], object]) -> bytes:
        """Change a blob; half of the time, so that it passes a check."""
        wanted, wrong = self.random.random() < 0.5, right
        for _ in range(MAX_DRAWS):
            wrong = self.random.choice([self.raw, self._extreme, self._extreme])(right)
            if not wanted or (wrong != right and _passes(wrong, check)):
                break
        return wrong or b"\0"

    def _extreme(self, right: bytes) -> bytes:
        """Return the blob with an extreme byte or number, or a flipped bit, in some places."""
        wrong = bytearray(right)
        for _ in range(self.random.choice([1, 1, 1, 2, 4])):
            at = self.random.randrange(len(wrong))
            flipped = bytes([wrong[at] ^ 1 << self.random.randrange(8)])
            word = struct.pack("<Q", self.random.choice(WORDS))[: self.random.choice([2, 4, 8])]
            new = self.random.choice([flipped, bytes([self.random.choice(EXTREMES)]), word])
            wrong[at : at + len(new)] = new[: len(wrong) - at]
        return bytes(wrong)


def _passes(wrong: bytes, check: Callable[[bytes], object]) -> bool:
    try:
        check(wrong)
    except FormatError:
        return False
    return True


def of_ucx(right: bytes, blobs: BlobMutator) -> bytes:
    """Return an address of the ucx driver with a malformed blob and a digest that matches it."""
    address = ucx.decode(right)
    changes: dict[str, Any] = {}
    if blobs.random.random() < 0.7:
        changes["worker"] = blobs.changed(address.worker, check_worker_address)
    else:
        [first, *rest] = address.regions
        packed = blobs.changed(first.packed, check_key)
        changes["regions"] = [msgspec.structs.replace(first, packed=packed), *rest]
    return ucx.encode(msgspec.structs.replace(address, **changes))


def of_nixl(right: bytes, blobs: BlobMutator) -> bytes:
    """Return an address of the nixl driver with malformed metadata and a digest that matches it.

    Each address has its own agent name: once NIXL refused an address, it refuses every other one
    with the same name.
    """
    address = nixl.decode(right)
    name = f"{blobs.random.randrange(1 << 64):x}".zfill(len(address.name))
    renamed = address.metadata.replace(address.name.encode(), name.encode())
    metadata = blobs.changed(renamed, parsed)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(address, name=name, metadata=metadata, digest=digest_of(metadata))
    )


MUTATIONS: dict[str, Callable[[bytes, BlobMutator], bytes]] = {
    "ucx": of_ucx,
    # A worker address, as a hello carries it.
    "ucx-server": lambda right, blobs: blobs.changed(
        ucx.decode(right).worker, check_worker_address
    ),
    "nixl": of_nixl,
    "loopback": lambda right, blobs: blobs.packed(right),
}


class Target(PeerServer):
    """The process that the addresses are tried on; each method returns the outcome."""

    def try_connect(self, data: bytes) -> str:
        try:
            peer = self.transport.connect(data)
        except ConnectError:
            return "refused"
        with contextlib.suppress(TransportError):
            self._read(peer)
        with contextlib.suppress(TransportError):
            self.transport.disconnect(peer)
        return "connected"

    def _read(self, peer: PeerId) -> None:
        """Read eight bytes of each region of the peer, so that the driver unpacks its keys."""
        transport: Any = self.transport
        for region in list(transport._peers[peer].regions)[:2]:
            pairs = [(self.region.address, region.address, 8)]
            copies = copies_between(pairs, local=self.region, remote=region)
            transfer, deadline = transport.read(peer, copies), time.monotonic() + READ_SECONDS
            while not transport.poll([transfer])[0].state.final and time.monotonic() < deadline:
                time.sleep(0.0005)

    def try_hello(self, worker: bytes) -> str:
        """Let a ucx server receive a hello with this worker address; close the connection again."""
        transport: Any = self.transport
        server, instance = transport._server, transport._instance
        hello = messages.Hello(os.urandom(16), instance, "somebody", worker, server.withdrawals, 0)
        message = messages.decode(messages.encode(hello))
        if message is None:
            return "refused"
        with server.lock:
            server.worker._arrived.append(message)
            server.run_once()
            met = bool(server._by_endpoint)
        transport._wake()
        time.sleep(SETTLE_SECONDS)
        with server.lock:
            for connection in list(server._by_endpoint.values()):
                server._close(connection)
        return "connected" if met else "refused"


def crash_no_process(side: str) -> None:
    """Assert that ``COUNT`` addresses are refused, or connected to, and that no process ends."""
    driver, blobs, outcomes = side.removesuffix("-server"), BlobMutator(1), Counter[str]()
    command = "try_hello" if side.endswith("-server") else "try_connect"
    with Process(FACTORIES[driver], {}, "cpu", 1 << 16) as honest:
        right, left = honest.address(), COUNT
        while left:
            count = min(left, ADDRESSES_PER_PROCESS)
            server = f"{__name__}:Target"
            options = OPTIONS.get(driver, {})
            with Process(FACTORIES[driver], options, "cpu", 4096, server=server) as target:
                for _ in range(count):
                    wrong = MUTATIONS[side](right, blobs)
                    try:
                        outcomes[target.ask(command, wrong)] += 1
                    except Exception as exc:
                        raise AssertionError(f"an address ended it, {exc}: {wrong.hex()}") from exc
            left -= count
        assert honest.process.poll() is None, "the peer whose address was changed has ended"
    assert set(outcomes) <= {"refused", "connected"}
    assert outcomes["refused"]
