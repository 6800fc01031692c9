"""Many malformed inputs cause no crash, no hang and no growth of memory; a valid one still works.

``KVFERRY_FUZZ`` is the number of inputs (20,000 by default; a million takes some minutes), and
``KVFERRY_FUZZ_SEED`` their seed.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
import zmq

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.errors import HandshakeError, TicketError, WireError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.rooms import RoomId, Rooms
from kvferry.core.security import OPEN, Access, KeyPair, TicketKey, TicketSecrets, generate
from kvferry.core.side_channel.client import fetch, ping
from kvferry.core.side_channel.compatibility import engine_info
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import encrypt
from kvferry.integrations.vllm import ticket_format as tickets
from tests.core.messages import payload
from tests.faults.engine_processes import EngineProcess, engine_process
from tests.faults.mutations import Mutator
from tests.pinned import write as store

INPUTS = int(os.environ.get("KVFERRY_FUZZ", "20000"))
SEED = int(os.environ.get("KVFERRY_FUZZ_SEED", "1"))
TIMEOUT = 60.0
"""Seconds; far longer than any answer takes on a busy machine."""
MAX_GROWTH = 32 << 20
"""Bytes by which a process may grow: allocators keep some freed memory."""

pytestmark = pytest.mark.timeout(120 + INPUTS // 100)

SECRETS = TicketSecrets.of(["a secret of both engines"])
TICKET_KEY = TicketKey()
SERVER, CLIENT = generate(), generate()
RANKS = [side.encode(payload(rank)) for rank in (0, 1)]
TICKET = tickets.TicketParams(
    engine="prefill",
    incarnation=7,
    request="r",
    host="127.0.0.1",
    port=5600,
    hold=Hold(slot=3, generation=9),
    pages=((5, 4, 9), (0, 2)),
    first_index=(0, 1),
    tokens=48,
    digest=bytes(16),
    computed=True,
    key=SERVER.public,
)
ASK, PING = (side.PayloadRequest(oldest=1, newest=1, engine="prefill"), side.Ping(engine="prefill"))
REQUESTS = [
    side.encode(each)
    for each in (
        ASK,
        PING,
        side.Follow(engine="prefill", rooms=[(bytes(16), 3), (bytes(range(16)), 0)]),
        side.Follow(engine="prefill", rooms=[(bytes(range(16)), 0)], prompts=[bytes(range(16))]),
        side.Health(),
        side.Health(engine="prefill"),
        side.Revoke(engine="prefill", conversations=True),
    )
]


# Decoders.


def decode_ticket(data: bytes) -> None:
    """Decode a ticket as JSON from a router, with and without ticket secrets."""
    params = json.loads(data)
    tickets.read_ticket(params)
    tickets.read_ticket(params, SECRETS)


def mutated_ticket(mutator: Mutator) -> bytes:
    right = TICKET.params(SECRETS if mutator.random.random() < 0.2 else None, TICKET_KEY)
    wrong = {key: mutator.tree(value) for key, value in right.items()}
    which = mutator.random.choice(list(right))
    return json.dumps(right | {which: wrong[which]}, default=repr).encode()


def packed(*right: bytes) -> Callable[[Mutator], bytes]:
    return lambda mutator: mutator.packed(mutator.random.choice(right))


def pinned(kind: str) -> Callable[[Mutator], bytes]:
    """Change what is pinned of a kind of message."""
    return packed(*(data for name, data in store.load().items() if name.startswith(f"{kind}, ")))


DECODERS: dict[str, tuple[Callable[[Mutator], bytes], Callable[[bytes], object]]] = {
    "request": (packed(*REQUESTS), side.decode_request),
    "reply": (pinned("reply"), side.decode_reply),
    "payload": (packed(*RANKS), wire.decode_payload),
    "notes": (pinned("note"), wire.decode_notes),
    "engine": (packed(*RANKS), lambda data: engine_info([RANKS[0], data])),
    "ticket": (mutated_ticket, decode_ticket),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_accept_or_refuse_mutated_input(kind: str) -> None:
    make, decode = DECODERS[kind]
    mutator = Mutator(SEED)
    share = INPUTS * 6 // 10 // len(DECODERS)
    refused, before = 0, 0
    for count in range(share):
        data = make(mutator)
        try:
            decode(data)
        except (WireError, HandshakeError, TicketError):
            refused += 1
        except Exception as exc:
            raise AssertionError(f"{kind} {count} of seed {SEED}: {data!r}") from exc
        if count == share // 4:
            before = resident("self")
    assert refused > share // 2
    assert resident("self") - before < MAX_GROWTH


# Side channel.


ACCESS = Access(own=CLIENT, peers=frozenset({SERVER.public}))
"""The settings of an admitted client of a keyed side channel."""


class Fatal(logging.Handler):
    """Ends the process at an exception that the server survived, and did not expect."""

    def emit(self, record: logging.LogRecord) -> None:
        os._exit(3)


def run_side_channel(pipe: Connection, keyed: bool, server: KeyPair, client: bytes) -> None:
    """Serve until told to end."""
    logging.getLogger().addHandler(Fatal(logging.ERROR))
    access = Access(own=server, peers=frozenset({client})) if keyed else OPEN
    rooms, room = Rooms(), bytes(range(16))
    rooms.open(RoomId(room, room))
    more: dict[str, Any] = {"engine": "prefill", "incarnation": 7, "rooms": rooms}
    with HandshakeServer(RANKS, access=access, **more) as serving:
        pipe.send(serving.port)
        pipe.recv()


class SideChannel:
    """A side channel in a process of its own, which would end in a crash."""

    def __init__(self, process: EngineProcess, keyed: bool) -> None:
        self.keyed, self._pid, self.port = keyed, str(process.process.pid), process.answer()
        self._before: tuple[int, int, int] | None = None

    def expect_answers(self) -> None:
        access, key = (ACCESS, SERVER.public) if self.keyed else (OPEN, b"")
        options: Any = {"timeout": TIMEOUT, "access": access, "key": key}
        assert ping("127.0.0.1", self.port, "prefill", **options) == 7
        assert len(fetch("127.0.0.1", self.port, "prefill", **options).ranks) == 2

    def remember(self) -> None:
        """Note the resources that it uses, which are not to grow from now on."""
        self._before = self._footprint()

    def expect_no_growth(self) -> None:
        self.expect_answers()
        assert self._before is not None
        memory, files, threads = (
            now - then for now, then in zip(self._footprint(), self._before, strict=True)
        )
        assert memory < MAX_GROWTH
        assert files < 20  # connections are closed a little later
        assert threads == 0

    def _footprint(self) -> tuple[int, int, int]:
        counts = (len(os.listdir(f"/proc/{self._pid}/{what}")) for what in ("fd", "task"))
        files, threads = counts
        return resident(self._pid), files, threads


@contextmanager
def serve_side_channel(keyed: bool) -> Iterator[SideChannel]:
    with engine_process(run_side_channel, keyed, SERVER, CLIENT.public) as process:
        found = SideChannel(process, keyed)
        yield found
        found.expect_no_growth()
        process.pipe.send("end")
        process.process.join(TIMEOUT)
        assert process.process.exitcode == 0


def resident(pid: str) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def message(mutator: Mutator) -> list[bytes]:
    """Return some frames, none of which is so long that the server closes the connection."""
    pick = mutator.random.choice
    ahead = [pick([b"", b"", mutator.raw(b"abc")]) for _ in range(pick([0, 0, 0, 1, 1, 2, 9]))]
    request = mutator.packed(pick(REQUESTS))
    return [frame[: side.MAX_REQUEST_BYTES] for frame in (*ahead, request)]


@pytest.mark.parametrize("keyed", [False, True], ids=["open", "keyed"])
def test_side_channel_answers_mutated_messages(keyed: bool) -> None:
    """An admitted peer sends the messages; each gets an answer."""
    mutator, share = Mutator(SEED), INPUTS * 35 // 100 // 2
    with serve_side_channel(keyed) as side_channel, zmq.Context() as context:
        for start in range(0, share, 1000):
            with context.socket(zmq.DEALER) as channel:
                channel.linger, channel.rcvtimeo = 0, int(TIMEOUT * 1e3)
                if keyed:
                    encrypt(channel, CLIENT)
                    channel.curve_serverkey = zmq.utils.z85.encode(SERVER.public)
                channel.connect(f"tcp://127.0.0.1:{side_channel.port}")
                for _ in range(min(1000, share - start)):
                    channel.send_multipart(message(mutator))
                    reply = side.decode_reply(channel.recv_multipart()[-1])
                    assert isinstance(reply, side.Reply)
            side_channel.expect_answers()
            if start <= share // 4:
                side_channel.remember()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00%s" + bytes(28)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + bytes(range(32)) + bytes(8 + 80)


def session(mutator: Mutator) -> bytes:
    """Return the bytes of a client's TCP connection, changed in one or more places."""
    mechanism = mutator.random.choice([b"NULL", b"CURVE", b"PLAIN", b"GSSAPI"])
    frame = side.encode(PING)
    parts = [
        GREETING.replace(b"%s", mechanism.ljust(20, b"\0"))[:64],
        mutator.random.choice([READY, HELLO, b""]),
        *[b"\x00" + bytes([len(frame)]) + frame] * mutator.random.choice([0, 1, 3]),
        mutator.random.choice([b"", b"\x02" + b"\xff" * 8, b"\x06" + bytes(8), b"\x01\x00" * 500]),
    ]
    which = mutator.random.randrange(len(parts))
    parts[which] = mutator.raw(parts[which])
    return b"".join(parts)


@pytest.mark.parametrize("keyed", [False, True], ids=["open", "keyed"])
def test_side_channel_survives_arbitrary_bytes(keyed: bool) -> None:
    """Any client may send the bytes, also in the middle of ZMQ's own handshake."""
    mutator, share = Mutator(SEED), max(INPUTS * 5 // 100 // 2, 1)
    with serve_side_channel(keyed) as side_channel:
        for count in range(share):
            with (
                suppress(ConnectionError),
                socket.create_connection(("127.0.0.1", side_channel.port), TIMEOUT) as raw,
            ):
                raw.sendall(session(mutator))
                if mutator.random.random() < 0.2:
                    raw.settimeout(0.01)
                    with suppress(TimeoutError):
                        raw.recv(1 << 16)
            if count % 500 == 0:
                side_channel.expect_answers()
            if count == share // 4:
                side_channel.remember()
