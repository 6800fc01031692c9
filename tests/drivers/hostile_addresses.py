"""Try addresses with a valid digest and hostile contents on a process, and count the outcomes.

Run it from the root of the repository::

    python -m tests.drivers.hostile_addresses ucx 10000         # in a client that connects
    python -m tests.drivers.hostile_addresses ucx-server 10000  # in a server that gets a hello
    python -m tests.drivers.hostile_addresses nixl 10000
    python -m tests.drivers.hostile_addresses loopback 10000
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvferry.core.errors import ConnectError, TransportError
from kvferry.core.memory import Region, region_of
from kvferry.core.transport import PeerId, Transport
from kvferry.core.transport.addresses import digest_of
from kvferry.core.transport.copies import copies_between
from kvferry.drivers.ucx_format import FormatError, check_key, check_worker_address
from kvferry.testing.peers import Process
from tests.faults.mutations import Mutator

ROOT = Path(__file__).parents[2]
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
ANSWER_SECONDS = 30.0
"""Seconds without an answer after which a process counts as hanging."""
READ_SECONDS = 0.2
MAX_DRAWS = 200
SETTLE_SECONDS = 0.01
EXTREMES = (0, 1, 2, 0x1F, 0x20, 0x3F, 0x40, 0x7F, 0x80, 0xFE, 0xFF)
WORDS = (0, 1, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


# Hostile addresses.


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
    from kvferry.drivers.ucx import address as wire

    address = wire.decode(right)
    changes: dict[str, Any] = {}
    if blobs.random.random() < 0.7 or not address.regions:
        changes["worker"] = blobs.changed(address.worker, check_worker_address)
    else:
        [first, *rest] = address.regions
        packed = blobs.changed(first.packed, check_key)
        changes["regions"] = [msgspec.structs.replace(first, packed=packed), *rest]
    return wire.encode(msgspec.structs.replace(address, **changes))


def of_ucx_server(right: bytes, blobs: BlobMutator) -> bytes:
    """Return a malformed worker address, as a hello carries it."""
    from kvferry.drivers.ucx import address as wire

    return blobs.changed(wire.decode(right).worker, check_worker_address)


def of_nixl(right: bytes, blobs: BlobMutator) -> bytes:
    """Return an address of the nixl driver with malformed metadata and a digest that matches it.

    Each address has its own agent name: once NIXL refused an address, it refuses every other one
    with the same name.
    """
    from kvferry.drivers.nixl import address as wire
    from kvferry.drivers.nixl.agent_metadata import parsed

    address = wire.decode(right)
    name = f"{blobs.random.randrange(1 << 64):x}".zfill(len(address.name))
    address = msgspec.structs.replace(
        address, name=name, metadata=address.metadata.replace(address.name.encode(), name.encode())
    )
    metadata = blobs.changed(address.metadata, parsed)
    return msgspec.msgpack.encode(
        msgspec.structs.replace(address, metadata=metadata, digest=digest_of(metadata))
    )


def of_loopback(right: bytes, blobs: BlobMutator) -> bytes:
    """Return an address of the loopback driver with changed values."""
    return blobs.packed(right)


MUTATIONS: dict[str, Callable[[bytes, BlobMutator], bytes]] = {
    "ucx": of_ucx,
    "ucx-server": of_ucx_server,
    "nixl": of_nixl,
    "loopback": of_loopback,
}


# The process that the addresses are tried on.


def main(side: str) -> None:
    """Read addresses from standard input and answer each with its outcome."""
    driver = side.removesuffix("-server")
    module, _, name = FACTORIES[driver].partition(":")
    transport = getattr(__import__(module, fromlist=[name]), name)(**OPTIONS.get(driver, {}))
    buffer = np.zeros(4096, np.uint8)
    transport.register(region_of(buffer))
    tried = try_hello if side.endswith("-server") else try_connect
    # C libraries may print to standard output, so answers go to a duplicate of it.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        while head := sys.stdin.buffer.read(4):
            data = sys.stdin.buffer.read(struct.unpack("<I", head)[0])
            answers.write(tried(transport, data, region_of(buffer)) + "\n")
            answers.flush()


def try_connect(transport: Transport, data: bytes, local: Region) -> str:
    try:
        peer = transport.connect(data)
    except ConnectError:
        return "refused"
    except TransportError as exc:
        return f"wrong error: {type(exc).__name__}"
    except Exception as exc:  # noqa: BLE001 - what it is, is said
        return f"wrong error: {type(exc).__name__}: {exc}"
    try:
        read_registered_memory(transport, peer, local)
    except TransportError:
        pass
    except Exception as exc:  # noqa: BLE001 - likewise
        return f"wrong error in read: {type(exc).__name__}: {exc}"
    with contextlib.suppress(TransportError):
        transport.disconnect(peer)
    return "connected"


def read_registered_memory(transport: Any, peer: PeerId, local: Region) -> None:
    """Read eight bytes of each region of the peer, so that the driver unpacks its keys."""
    for region in list(transport._peers[peer].regions)[:2]:
        copies = copies_between([(local.address, region.address, 8)], local=local, remote=region)
        transfer, deadline = transport.read(peer, copies), time.monotonic() + READ_SECONDS
        while not transport.poll([transfer])[0].state.final and time.monotonic() < deadline:
            time.sleep(0.0005)


def try_hello(transport: Any, worker: bytes, local: Region) -> str:
    """Let a server receive a hello with this worker address, and close the connection again."""
    from kvferry.drivers.ucx import messages

    del local

    hello = messages.Hello(
        os.urandom(16), transport._instance, "somebody", worker, transport._server.withdrawals, 0
    )
    message = messages.decode(messages.encode(hello))
    if message is None:
        return "refused"
    server = transport._server
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


@dataclass(slots=True)
class TargetProcess:
    """A process that addresses are tried on; it is replaced when it ends."""

    side: str  # a key of ``MUTATIONS``
    # The exit status of every process that ended, and the address that ended it.
    deaths: list[tuple[str, bytes]] = field(default_factory=list)
    _tried: int = 0
    _process: subprocess.Popen[bytes] | None = None

    def outcome(self, data: bytes) -> str:
        """Return the outcome of trying an address, such as ``refused`` or ``died: ...``."""
        if self._tried % ADDRESSES_PER_PROCESS == 0:
            self.close()
        self._tried += 1
        process = self._process = self._process or self._started()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(struct.pack("<I", len(data)) + data)
            process.stdin.flush()
        # select takes no descriptor above 1023.
        ready = wait([process.stdout.fileno()], ANSWER_SECONDS)
        answer = process.stdout.readline().decode().strip() if ready else ""
        if answer:
            return answer
        hangs = not ready
        if not hangs:
            process.wait()
        self.close()
        status = "hung" if hangs else f"died: {_status(process.returncode)}"
        self.deaths.append((status, data))
        return status

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        code = f"from tests.drivers.hostile_addresses import main; main({self.side!r})"
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "NIXL_LOG_LEVEL": "FATAL", "UCX_HANDLE_ERRORS": "none"},
        )


def _status(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


@contextlib.contextmanager
def honest_peer(side: str) -> Iterator[Callable[[], bytes]]:
    """Yield a function that returns the valid address of a peer, replaced when its process ends."""
    driver = side.removesuffix("-server")
    made: list[Process] = []
    addresses: list[bytes] = []

    def address() -> bytes:
        if not made or made[-1].process.poll() is not None:
            made.append(Process(FACTORIES[driver], {}, "cpu", 1 << 16))
            addresses.append(made[-1].address())
        return addresses[-1]

    try:
        address()
        yield address
    finally:
        for one in made:
            with contextlib.suppress(Exception):
                one.end()


def try_addresses(side: str, count: int, seed: int = 1) -> tuple[Counter[str], TargetProcess]:
    """Try a number of hostile addresses and return the count of each outcome."""
    blobs, found, tried = BlobMutator(seed), Counter[str](), TargetProcess(side)
    with honest_peer(side) as right, contextlib.closing(tried):
        before = right()
        for _ in range(count):
            found[tried.outcome(MUTATIONS[side](before, blobs))] += 1
            if right() != before:
                found["the honest peer died"] += 1
                before = right()
    return found, tried


def crash_no_process(side: str) -> None:
    """Assert that a sample of addresses is refused, or connected to, and that no process ends."""
    outcomes, tried = try_addresses(side, COUNT)
    assert tried.deaths == []
    assert set(outcomes) <= {"refused", "connected"}
    assert outcomes["refused"]


if __name__ == "__main__":
    outcomes, process = try_addresses(sys.argv[1], int(sys.argv[2]))
    sys.stdout.write(json.dumps(dict(outcomes.most_common()), indent=1) + "\n")
    for status, data in process.deaths:
        sys.stdout.write(f"{status} {data.hex()}\n")
