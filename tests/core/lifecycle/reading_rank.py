"""A consumer rank that carries out the actions of its loads on the simulated transport.

What the models add to it is in ``early_engines``, ``staged_simulation`` and ``two_engines``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from kvferry.core.errors import KVFerryError, PeerLostError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.load_machine import Action, LoadAction, LoadId, RemoteRank
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import State
from tests.core.lifecycle.fabric import Link, Message, Transfer, release, require
from tests.core.lifecycle.schedulers import RankLoads

Plan = tuple[tuple[RemoteRank, ...], ...]
"""Per consumer rank, the producer ranks that it reads or notifies."""
Move = Callable[[], None]


@dataclass(slots=True, kw_only=True, eq=False)
class RankLoad:
    """A rank's part of a load.

    Attributes:
        request: with its ``pages``, and the ``excuses`` for which its load may fail.
        shared: whether no "done" or "abandon" is sent.
        reads: its transfers of pages, by producer rank.
        told: the producer ranks that were told "done" or "abandon".
        is_over: whether it was reported.
    """

    request: Any
    shared: bool = False
    reads: dict[int, Transfer] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    is_over: bool = False

    @property
    def hold(self) -> Hold:
        """The hold whose pages it reads."""
        raise NotImplementedError


RankLoadT = TypeVar("RankLoadT", bound=RankLoad)


class ReadingRank(Generic[RankLoadT]):
    """One consumer rank: the pages that it reads into, its loads, and what is under way.

    Args:
        rank: its index.
        simulation: both engines, and what is between them.
        pages: how many pages it has, without the null page.
    """

    unit = 1
    """As in ``LoadMachine.handshake_succeeded``."""

    def __init__(self, rank: int, simulation: Any, *, pages: int) -> None:
        self.rank, self.simulation = rank, simulation
        self.remote_ranks: tuple[RemoteRank, ...] = simulation.plan[rank]
        self.loads = RankLoads(simulation.components)
        self.pages: list[Any] = [{} for _ in range(pages + 1)]
        self.pulls: dict[LoadId, RankLoadT] = {}
        self.handshakes: list[LoadId] = []
        self.transfers: list[Transfer] = []
        self.link = Link()
        self.inbox: deque[Any] = deque()
        self.results: list[tuple[Any, KVFerryError | None]] = []

    def moves(self) -> Iterator[Move]:
        if self.inbox:
            yield self.launch
        for load_id in self.handshakes:
            yield partial(self.answer, load_id)
        if any(t.state is not State.PENDING for t in self.transfers):
            yield self.poll
        if self.loads.open:
            yield self.tick

    def launch(self) -> None:
        step = self.inbox.popleft()
        self.begin(step)
        for load_id, pull in self.pulls.items():
            if pull.request in step.aborts and not pull.is_over:
                self.loads[load_id].abort(KVFerryError("given up"))
        step.outputs[self.rank], self.results = self.results, []
        self.perform()

    def begin(self, step: Any) -> None:
        """Begin the loads of a step."""
        raise NotImplementedError

    def answer(self, load_id: LoadId) -> None:
        self.handshakes.remove(load_id)
        for page in self.pulls[load_id].request.pages if self.loads[load_id].is_wanted else ():
            self.pages[page] = {}
        self.loads[load_id].handshake_succeeded(self.remote_ranks, self.unit)
        self.perform()

    def tick(self) -> None:
        self.loads.tick(self.simulation.now)
        self.perform()

    def poll(self) -> None:
        for transfer in list(self.transfers):
            [load_id], rank = transfer.loads, transfer.rank
            error = transfer.error or PeerLostError("lost")
            if transfer.state is State.FAILING:
                self.loads[load_id].failing(rank, error)
            elif transfer.state.final:
                self.transfers.remove(transfer)
                if transfer.state is State.FAILED:
                    self.loads[load_id].lost(rank, error)
                else:
                    self._arrived(load_id, transfer)
        self.perform()

    def _arrived(self, load_id: LoadId, transfer: Transfer) -> None:
        load, rank, word = self.loads[load_id], transfer.rank, transfer.words.get(load_id, 0)
        if transfer.op is LoadAction.READ:
            load.pages_read(rank)
        elif transfer.op is LoadAction.WATERMARK:
            load.watermark_read(rank, word)
        elif transfer.op is LoadAction.CHECK:
            load.checked(rank, word)
        else:
            load.fenced(rank, word)

    def perform(self) -> None:
        while actions := self.loads.take():
            for action in sorted(actions, key=lambda action: action.op is LoadAction.REPORT):
                self._perform(action, self.pulls[action.load])

    def _perform(self, action: Action, pull: RankLoadT) -> None:
        if action.op is LoadAction.REPORT:
            require(not pull.is_over, "reported twice by one rank")
            require(not self._running(action.load), "reported while bytes may land")
            pull.is_over = True
            self.end(pull, action.error)
        elif action.op is LoadAction.CANCEL:
            for transfer in self._running(action.load, action.rank):
                transfer.cancel(action.load)
        elif action.op in (LoadAction.DONE, LoadAction.ABANDON):
            require(action.rank not in pull.told, "a rank was told twice")
            require(not self._running(action.load), "told while bytes may land")
            pull.told.add(action.rank)
            if not self.link.broken:
                abandoned = action.op is LoadAction.ABANDON
                message = self._message(action.rank, pull, abandoned=abandoned)
                self.simulation.fabric.messages.append(message)
        else:
            self._post(action, pull)

    def end(self, pull: RankLoadT, error: KVFerryError | None) -> None:
        """Act on the end of a load."""
        raise NotImplementedError

    def items(self, action: Action, pull: RankLoadT) -> list[tuple[int, int]]:
        """Return this rank's page and the producer's for each page that an action reads."""
        raise NotImplementedError

    def check_fence(self, pull: RankLoadT) -> None:
        """Check that a load may be fenced."""

    def _post(self, action: Action, pull: RankLoadT) -> None:
        running = self._running(action.load, action.rank)
        require(not running, "two transfers of one load from one rank")
        require(not pull.is_over, "a transfer after the report")
        is_read, is_fence = action.op is LoadAction.READ, action.op is LoadAction.FENCE
        tells = is_fence and not pull.shared
        if is_fence:
            self.check_fence(pull)
            require(pull.reads[action.rank].state is State.DONE, "a fence before the data")
        transfer = Transfer(
            op=action.op,
            link=self.link,
            rank=action.rank,
            loads=(action.load,),
            items=self.items(action, pull) if is_read else [pull.hold.slot],
            take=self._take_page if is_read else partial(self._take_word, action),
            message=self._message(action.rank, pull, abandoned=False) if tells else None,
        )
        if is_read:
            pull.reads[action.rank] = transfer
        self.transfers.append(transfer)
        try:
            self.simulation.fabric.post(transfer)
        except PeerLostError as exc:
            self.transfers.remove(transfer)
            pull.request.excuses.append("lost")
            self.loads[action.load].lost(action.rank, exc)

    def source(self, rank: int) -> Any:
        """Return a producer rank, with its ``readable`` pages and its ``words``."""
        return self.simulation.prefill.ranks[rank]

    def _take_page(self, item: tuple[int, int], source: int) -> None:
        page, remote = item
        self.pages[page][source] = self.source(source).readable[remote]

    def _take_word(self, action: Action, slot: int, source: int) -> None:
        rank = self.source(source)
        words = rank.watermarks if action.op is LoadAction.WATERMARK else rank.words
        for transfer in self._running(action.load, action.rank):
            transfer.words[action.load] = words[slot]

    def _message(self, rank: int, pull: RankLoadT, *, abandoned: bool) -> Message:
        note = release(
            self.simulation.prefill.incarnation,
            pull.hold,
            engine="decode",
            rank=self.rank,
            expected=sum(rank in [r.rank for r in ranks] for ranks in self.simulation.plan),
            abandoned=abandoned,
        )
        return Message(sender="decode", rank=rank, payload=encode([note]), origins=(0,))

    def _running(self, load_id: LoadId, rank: int | None = None) -> list[Transfer]:
        return [t for t in self.transfers if load_id in t.loads and rank in (None, t.rank)]

    def may_land(self, pages: tuple[int, ...]) -> bool:
        items = [
            item[0]
            for transfer in self.transfers
            if transfer.op is LoadAction.READ and not transfer.state.final
            for item in transfer.items
        ]
        return not set(items).isdisjoint(pages)

    def sever(self, *, failing: bool) -> None:
        """Break the connection, and make another for later transfers."""
        for pull in self.pulls.values():
            pull.request.excuses.append("severed")
        self.simulation.fabric.sever(self.link, failing=failing)
        for load_id, pull in self.pulls.items():
            if not pull.is_over:
                self.loads[load_id].abort(PeerLostError("severed"))
        self.link = Link()
        self.perform()
