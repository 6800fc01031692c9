"""The side that serves: who has come, what they may still read, and what they had to say.

A peer's reads and writes of this side's memory may be carried out by this side's UCX, which checks
nothing. So before memory is deregistered, everyone who may know of it is told, and answers when
nothing of theirs uses it any more; who does not answer in time is cut off, after which what still
arrives from there is dropped.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import Notification
from kvferry.drivers.ucx.address import Instance, KeyId
from kvferry.drivers.ucx.fair_lock import FairLock
from kvferry.drivers.ucx.message_transfer import checked, lined_up, store
from kvferry.drivers.ucx.messages import (
    MAX_BACKLOG,
    MAX_WITHDRAWN,
    Bye,
    Ended,
    Fetch,
    Fetched,
    Hello,
    LineId,
    Message,
    Note,
    Refused,
    Released,
    Store,
    Stored,
    Welcome,
    Withdrawn,
)
from kvferry.drivers.ucx.ucp import Endpoint
from kvferry.drivers.ucx.worker import Worker, wait_closed
from kvferry.drivers.ucx_format import FormatError, check_worker_address, is_known

_NOTE_BYTES = 256
"""What keeping a notification takes besides its payload."""

MAX_LINES = 4096
"""Callers that are served at once, two lines each where they read much. Each takes an endpoint of
UCX and, over tcp, a file descriptor or more; 256 engines of eight ranks have as many."""
MAX_WAITING = 256
"""Hellos that wait until an earlier line of their caller is closed."""
MAX_REFUSED = 64
"""Connections on which a refusal was said, and which are there until it has arrived."""


@dataclass(slots=True, kw_only=True, eq=False)
class ClientConnection:
    """A caller's line, seen from this side.

    Attributes:
        worker: the address of the caller's worker.
        number: of the endpoint, in this side's.
        lane: which of the caller's.
        released: up to which withdrawal it has answered.
        welcome: whether it may read and write.
    """

    line: LineId
    caller: str
    worker: bytes
    endpoint: Endpoint
    number: int
    lane: int
    released: int
    welcome: bool


class Server:
    """Serves peers. Every method but the constructor needs ``lock``.

    Args:
        make: makes a worker.
        instance: this transport's.

    Attributes:
        lock: for the worker, and for everything here.
        worker: whose address peers get.
        format_known: whether the addresses that UCX makes and reads here can be checked.
        regions: what is registered.
    """

    def __init__(self, make: Callable[[], Worker], instance: Instance) -> None:
        self.lock = FairLock()
        self.worker = make()
        self.worker.carried = self._store
        self.format_known = is_known(self.worker.address)
        self._instance = instance
        self._visitors: dict[int, ClientConnection] = {}
        self._lines: dict[LineId, ClientConnection] = {}
        self._refused: deque[ClientConnection] = deque()
        # Until the lines that they take the place of are closed.
        self._waiting: deque[Hello] = deque()
        self._withdrawn: deque[KeyId] = deque(maxlen=MAX_WITHDRAWN)
        # What is to be said of what callers have sent with messages.
        self._stored: deque[Stored] = deque()
        self._notes: list[Notification] = []
        self._noted = 0
        self.withdrawals = 0
        self.regions: dict[KeyId, Region] = {}

    @property
    def workers(self) -> list[Worker]:
        """Those that have to be driven."""
        return [self.worker]

    def turn(self) -> bool:
        """Do what there is to do; whether there may be more."""
        busy = self.worker.turn()
        for number, _ in self.worker.failures():
            if number in self._visitors:
                self._part(self._visitors[number])
        while self._stored:
            stored = self._stored.popleft()
            if stored.line in self._lines:
                self._say(self._lines[stored.line], stored)
        for message in self.worker.messages():
            self._hear(message)
            # At once: any number of hellos may have come with one turn.
            busy |= self._greet()
        return self._greet() or busy

    def _greet(self) -> bool:
        """Answer the hellos that need not wait; whether there were any."""
        waited = len(self._waiting)
        while self._waiting and not self.worker.closing:
            self._answer(self._waiting.popleft())
        return len(self._waiting) < waited

    @property
    def taken(self) -> bool:
        """Whether somebody else drives it just now: nobody ever does."""
        return False

    @property
    def waits(self) -> bool:
        """Whether something has to be looked after even if nothing happens."""
        return bool(self._waiting)

    def take(self) -> list[Notification]:
        """The notifications since the last call."""
        taken, self._notes, self._noted = self._notes, [], 0
        return taken

    def withdraw(self, key: KeyId) -> int:
        """Tell everyone that a registration will be undone; its number."""
        self.withdrawals += 1
        self.regions.pop(key, None)
        self._withdrawn.append(key)
        for visitor in list(self._lines.values()):
            self._say(visitor, Withdrawn(visitor.line, self.withdrawals, key))
        return self.withdrawals

    def released(self, number: int) -> bool:
        """Whether everyone has answered up to a withdrawal, and whoever was cut off is."""
        return not (self._late(number) or self.worker.closing)

    def cut_off(self, number: int) -> None:
        """Close the lines of those who have not."""
        for visitor in self._late(number):
            self._part(visitor)

    def close(self) -> None:
        """Cut everyone off, tell them when that is done, and let the worker go."""
        told = list(self._lines.values())
        for visitor in list(self._visitors.values()):
            self._part(visitor)
        wait_closed(self.worker)
        self._tell_the_end(told)
        self.worker.destroy()

    def _tell_the_end(self, visitors: list[ClientConnection]) -> None:
        """Only then do they know that nothing of theirs is stored here any more."""
        for visitor in visitors:
            with contextlib.suppress(TransportError):
                visitor.endpoint, visitor.number = self.worker.connect(visitor.worker)
                self._visitors[visitor.number] = visitor
                self.worker.send(visitor.endpoint, Ended(visitor.line))
        wait_closed(self.worker)
        for visitor in list(self._visitors.values()):
            self._part(visitor)
        wait_closed(self.worker)

    def _late(self, number: int) -> list[ClientConnection]:
        return [v for v in self._lines.values() if v.released < number]

    def _hear(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._meet(message)
            return
        visitor = self._lines.get(message.line)
        if visitor is None:
            return
        match message:
            case Note():
                self._note(visitor, message.payload)
            case Released():
                visitor.released = max(visitor.released, min(message.number, self.withdrawals))
            case Fetch():
                self._fetch(visitor, message)
            case Bye():
                self._part(visitor)
            case _:  # what a host says
                return

    def _store(self, message: Message, body: int, nbytes: int) -> None:
        if isinstance(message, Store) and message.line in self._lines:
            move = self.worker.poster.move
            refusal = store(message.rows, body, nbytes, self.regions, move)
            self._stored.append(Stored(message.line, message.number, refusal))

    def _fetch(self, visitor: ClientConnection, message: Fetch) -> None:
        refusal, addresses, lengths = checked(message.rows, self.regions)
        buffer = self.worker.buffers.take()
        self.worker.poster.move(lined_up(buffer.address, lengths), addresses, lengths)
        answer = Fetched(message.line, message.number, refusal)
        with contextlib.suppress(TransportError):
            self.worker.send(visitor.endpoint, answer, buffer, int(lengths.sum()))

    def _note(self, visitor: ClientConnection, payload: bytes) -> None:
        """Keep a notification; cut off who sends more than anybody takes."""
        self._noted += len(payload) + _NOTE_BYTES
        if self._noted > MAX_BACKLOG:
            self._part(visitor)
        else:
            self._notes.append(Notification(sender=visitor.caller, payload=payload))

    def _meet(self, hello: Hello) -> None:
        """Close the earlier line of a caller, or forget it if it waits, and then answer.

        A hello that is not for this transport is dropped, with nothing of it used: that it has the
        random instance shows that its caller was admitted to a handshake.
        """
        if hello.host != self._instance or not self._may_wait(hello):
            return
        for visitor in list(self._lines.values()):
            if (visitor.caller, visitor.lane) == (hello.caller, hello.lane):
                self._part(visitor)
        for earlier in list(self._waiting):
            if (earlier.caller, earlier.lane) == (hello.caller, hello.lane):
                self._waiting.remove(earlier)
        self._waiting.append(hello)

    def _may_wait(self, hello: Hello) -> bool:
        """Whether there is room, the line is not another caller's, and UCX can read where it is."""
        if len(self._waiting) >= MAX_WAITING or self._names_anothers(hello):
            return False
        try:
            if self.format_known:
                check_worker_address(hello.worker)
        except FormatError:
            return False
        return True

    def _names_anothers(self, hello: Hello) -> bool:
        """Whether a line of this name is another's: a second one does not take its place."""
        visitor = self._lines.get(hello.line)
        if visitor is not None and (visitor.caller, visitor.lane) != (hello.caller, hello.lane):
            return True
        return any(waiting.line == hello.line for waiting in self._waiting)

    def _answer(self, hello: Hello) -> None:
        missed = self.withdrawals - hello.since
        reason = ""
        if len(self._lines) >= MAX_LINES:
            reason = f"it serves {MAX_LINES} connections, and no more: disconnect some"
        elif not 0 <= missed <= len(self._withdrawn):
            reason = "the address is too old: connect again with a new one"
        try:
            endpoint, number = self.worker.connect(hello.worker)
        except TransportError:
            return  # gone again
        visitor = ClientConnection(
            line=hello.line,
            caller=hello.caller,
            worker=hello.worker,
            endpoint=endpoint,
            number=number,
            lane=hello.lane,
            released=self.withdrawals,
            welcome=not reason,
        )
        self._visitors[number] = visitor
        if reason:
            self._say(visitor, Refused(hello.line, reason))
            self._refused.append(visitor)
            if len(self._refused) > MAX_REFUSED:
                self._part(self._refused[0])
            return
        self._lines[hello.line] = visitor
        keys = list(self._withdrawn)[len(self._withdrawn) - missed :]
        self._say(visitor, Welcome(hello.line, list(keys)))

    def _say(self, visitor: ClientConnection, message: Message) -> None:
        # Who cannot be told any more is reported as a failure.
        with contextlib.suppress(TransportError):
            self.worker.send(visitor.endpoint, message)

    def _part(self, visitor: ClientConnection) -> None:
        self.worker.end(visitor.endpoint)
        del self._visitors[visitor.number]
        if not visitor.welcome and visitor in self._refused:
            self._refused.remove(visitor)
        if self._lines.get(visitor.line) is visitor:
            del self._lines[visitor.line]
