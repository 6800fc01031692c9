"""The consumer's half of a simulated rank: it performs the actions of real ``LoadMachine``s.

It does so as the endpoint does: actions in order, "done" bound to a fence. With all that happens to
a load goes why it must fail (``causes``): it has to report the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.core.errors import (
    CopyError,
    DeadlineError,
    KVFerryError,
    PeerLostError,
    StaleError,
    TicketError,
    TransportError,
)
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.load_machine import (
    Action,
    LoadAction,
    LoadId,
    LoadMachine,
    RemoteRank,
    gone,
)
from kvferry.core.lifecycle.renewal_schedule import RenewalId, RenewalRequest, Renewals
from kvferry.core.lifecycle.silent_holds import HEARTBEAT_SECONDS
from kvferry.core.messages import Heartbeat, Note, Release, Renewal
from kvferry.core.transport import State
from tests.core.lifecycle.fabric import (
    Content,
    Link,
    Message,
    ProtocolViolation,
    Transfer,
    require,
)
from tests.core.lifecycle.producer_rank import BlockCopy, Device, Pages
from tests.core.lifecycle.turns import (
    BLOCK,
    LATE,
    LEASE,
    LOAD_TIMEOUT,
    STALE,
    Issue,
    LoadOrder,
    Step,
    Turn,
)

if TYPE_CHECKING:
    from tests.core.lifecycle.engine import Engine


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """One rank's part of a load, with what the checks need to know of it; renewed, it may wait."""

    turn: Turn
    issue: Issue
    load: LoadMachine = field(init=False)  # once it has begun
    pulls: bool = True  # whether pages are read and the outcome is reported; else "done" is sent
    is_early: bool = False  # whether it began with a part; ``is_last``: whether it has its ticket
    is_last: bool = True
    deadline: float = math.inf
    remote_ranks: tuple[RemoteRank, ...] = ()
    link: Link | None = None
    renewal: RenewalId | None = None
    settled: set[int] = field(default_factory=set)  # producer ranks whose fence is posted
    gone: bool = False  # whether a renewal found its hold gone
    # Why it must fail, in order: errors, or ``STALE``, ``LATE``.
    causes: list[KVFerryError | str] = field(default_factory=list)
    # Producer rank to the last transfer of its pages.
    reads: dict[int, Transfer] = field(default_factory=dict)
    # Producer ranks to which a "done" or "abandon" was sent that is not bound to a fence.
    told: set[int] = field(default_factory=set)
    # Producer ranks whose slot word has proven the pages valid.
    fenced: set[int] = field(default_factory=set)
    is_copying: bool = False
    reported: bool = False

    @property
    def hold(self) -> Hold:
        return self.issue.ticket.hold

    def wants(self) -> list[tuple[int, int, Content]]:
        """Return the destination, the source and the expected content of each page."""
        if not self.pulls:
            return []
        targets = (self.turn.host or self.turn.pages)[: self.turn.wanted]
        return list(zip(targets, self.issue.ticket.pages[0], self.issue.contents, strict=False))

    def add(self, cause: KVFerryError | str) -> None:
        if not self.is_copying:  # a copy to the device goes on, and may well succeed
            self.causes.append(cause)


class ConsumerRank:
    """The loads of a rank, and the work of an endpoint."""

    def __init__(self, engine: Engine, rank: int, device: Device) -> None:
        self.world = world = engine.world
        self.engine, self.rank, self._device = engine, rank, device
        self.remote_ranks = engine.plan[rank] if engine.plan else ()
        remotes = [remote.rank for ranks in engine.plan for remote in ranks]
        self.expected = {remote: remotes.count(remote) for remote in remotes}
        self.now = engine.clock(-500.0 * rank)
        self.host = Pages(world.options.staged)
        self.pages = self.host if world.options.staged else device.blocks
        self.pulls: dict[LoadId, Pull] = {}
        self.waiting: list[Pull] = []  # those that have not begun
        self.handshakes: list[Pull] = []
        self.transfers: list[Transfer] = []
        self.copies: list[BlockCopy] = []
        self.link = Link(broken=True)
        self._renewals = world.components.of(Renewals)()
        self._next_heartbeat = -math.inf
        self._actions: list[Action] = []
        self._results: list[tuple[Turn, KVFerryError | None]] = []
        self._producer = engine

    def producer(self) -> Engine:
        """Return the producer that runs now."""
        return self.world.engines[self.engine.peer]

    @property
    def open(self) -> list[Pull]:
        return [pull for pull in self.pulls.values() if not pull.reported]

    # The engine's step.

    def apply(self, step: Step) -> None:
        self.waiting += [Pull(turn=turn, issue=issue) for turn, issue in step.prepares]
        for order in step.begins:
            self._begin(order)
        for pull in self.open:
            if pull.turn in step.aborts and pull.pulls:
                error = KVFerryError("given up")
                self._abort(pull, error, error)
        self.pump()

    def take_results(self) -> list[tuple[Turn, KVFerryError | None]]:
        results, self._results = self._results, []
        return results

    def answer(self, pull: Pull, error: KVFerryError | None = None) -> None:
        """Let the producer that runs now answer a handshake, or let the handshake fail."""
        self.handshakes.remove(pull)
        if error is not None:
            self._on_handshake_failed(pull, error)
        else:
            self._reach()
            self._on_connected(pull)
        self.pump()
        if pull.reported:
            self._check_told(pull)

    def poll(self) -> None:
        for transfer in list(self.transfers):
            self._hear(transfer)
        self.pump()

    def tick(self) -> None:
        now = self.now()
        for pull in self.open:
            if pull.is_last and now >= pull.deadline:
                pull.add(LATE)
        self._renew()
        for pull in self.pulls.values():
            pull.load.tick(now)
        self.pump()

    # Begin and end.

    def _begin(self, order: LoadOrder) -> None:
        turn, ticket = order.turn, order.issue.ticket
        found = [pull for pull in self.pulls.values() if pull.turn is turn and pull.pulls]
        if found:
            self._hear_part(found[0], order)
            return
        waited = [pull for pull in self.waiting if pull.turn is turn]
        require(len(waited) == (order.is_prepared and turn.follows is None), "not prepared:", turn)
        for pull in waited:
            self.waiting.remove(pull)
            self._stop_renewal(pull)
        if order.shared and not order.pulls:
            return
        load = self.world.components.of(LoadMachine)(
            id=LoadId(len(self.pulls) + 1),
            actions=self._actions,
            hold=ticket.hold,
            computed=ticket.computed,
            reads=order.pulls,
            deadline=self.now() + LOAD_TIMEOUT,
            shared=order.shared,
            tokens=0 if order.is_last else ticket.tokens,
            awaits_device=True,
            needs_copy=bool(self.world.options.staged),
        )
        pull = waited[0] if waited else Pull(turn=turn, issue=order.issue)
        self.pulls[load.id], pull.load, pull.link = pull, load, None
        pull.pulls, pull.is_early = order.pulls, turn.follows is not None
        pull.is_last, pull.deadline = order.is_last, load.deadline
        if order.pulls:
            for page in turn.pages:  # vLLM zeroes new blocks
                self._device.queue(self._device.blocks.zero, page)
            self._device.queue(self._pass, load)
        if pull.gone:
            self._abort(pull, STALE, gone())
        if self._knows(ticket.incarnation):
            self._on_connected(pull)
        else:
            self.handshakes.append(pull)

    def _pass(self, load: LoadMachine) -> None:
        load.passed()
        self.pump()

    def _hear_part(self, pull: Pull, order: LoadOrder) -> None:
        ticket = order.issue.ticket
        if pull.reported or pull.is_last:
            return
        pull.issue, pull.is_last = order.issue, order.is_last
        pull.deadline = self.now() + LOAD_TIMEOUT
        if order.is_last:
            pull.load.finish(ticket.hold, computed=ticket.computed, deadline=pull.deadline)
        else:
            pull.load.extend(ticket.hold, ticket.tokens, pull.deadline)

    def _abort(self, pull: Pull, cause: KVFerryError | str, error: KVFerryError) -> None:
        pull.add(cause)
        pull.load.abort(error)

    def handle_producer_death(self, *, failing: bool) -> None:
        """Handle the death of the producer: its loads fail without waiting for transfer errors."""
        error = PeerLostError("it missed its pings")
        self.world.fabric.sever(self.link, failing=failing)
        for pull in self.open:
            if pull.link is self.link:
                self._abort(pull, error, error)
        self.pump()

    # The producer.

    def _knows(self, incarnation: int) -> bool:
        return self._producer.incarnation == incarnation and not self.link.broken

    def _reach(self) -> None:
        """Connect to the producer that runs now."""
        producer = self.producer()
        if producer is not self._producer or self.link.broken:
            self.world.fabric.sever(self.link)
            self.link, self._producer = Link(), producer

    def _on_connected(self, pull: Pull) -> None:
        try:
            self._check(pull.turn, pull.issue)
        except TicketError as exc:
            ours = pull.issue.ticket.incarnation == self._producer.incarnation
            require(pull.turn.forged or not ours, "refused a good ticket:", exc)
            self._on_handshake_failed(pull, exc)
            return
        wanted = pull.load.is_wanted
        require(wanted is not (pull.reported or bool(pull.causes)), "wanted is", wanted)
        for page in pull.turn.host if wanted else ():
            self.host.zero(page)
        pull.link, pull.remote_ranks = self.link, self.remote_ranks
        if pull.pulls and wanted and not pull.is_early:
            self._start_renewal(pull, at_once=False)
        pull.load.handshake_succeeded(self.remote_ranks, BLOCK if pull.is_early else 1)

    def _check(self, turn: Turn, issue: Issue) -> None:
        """Refuse a ticket that the producer did not make. Raises ``TicketError``."""
        if turn.forged:
            raise TicketError("its proof is not valid")
        if issue.ticket.incarnation != self._producer.incarnation:
            raise TicketError("it is another incarnation's")

    def _on_handshake_failed(self, pull: Pull, error: KVFerryError) -> None:
        pull.add(error)
        pull.load.handshake_failed(error)

    # Events.

    def _hear(self, transfer: Transfer) -> None:
        """Pass on the state of a transfer, unless it is pending."""
        if transfer.state.final:
            self.transfers.remove(transfer)
        pull, error = transfer.load, transfer.error or TransportError("failed")
        if transfer.op is None:
            if transfer.state.final:
                self._renewal_ended(pull, transfer)
        elif transfer.state is State.FAILING:
            pull.add(error)
            pull.load.failing(transfer.rank, error)
        elif transfer.state is State.FAILED:
            pull.add(error)
            pull.load.lost(transfer.rank, error)
        elif transfer.state is State.DONE:
            self._arrived(pull, transfer)

    def _arrived(self, pull: Pull, transfer: Transfer) -> None:
        rank, word = transfer.rank, transfer.word
        if transfer.op is LoadAction.READ:
            pull.load.pages_read(rank)
        elif transfer.op is LoadAction.WATERMARK:
            pull.load.watermark_read(rank, word)
        else:
            self._judge(pull, transfer, word)
            hear = pull.load.fenced if transfer.op is LoadAction.FENCE else pull.load.checked
            hear(rank, word)

    def _judge(self, pull: Pull, transfer: Transfer, word: int) -> None:
        """Evaluate a slot word by the protocol; if it is stale, check that the hold has ended."""
        ticket, fence = pull.issue.ticket, transfer.op is LoadAction.FENCE
        stands = word >> 1 == ticket.hold.generation
        if stands and (word & 1 or not fence or ticket.computed):
            if fence and not pull.causes:
                pull.fenced.add(transfer.rank)
        elif not pull.is_early:  # else, the hold may not be taken on yet, or have been replaced
            pull.add(STALE)
            self._check_gone(pull.turn, pull.issue, transfer.rank)

    def _check_gone(self, turn: Turn, issue: Issue, rank: int) -> None:
        """Check that a hold that was read as gone has ended, and not by this engine itself."""
        producer = self.producer()
        if issue.producer is not producer:
            return
        cause = producer.ranks[rank].producer.table.over.get(issue.ticket.hold)
        if cause is None:
            raise ProtocolViolation("an active hold was read as stale")
        # The requests whose "done" this incarnation sent or ordered after it knew of the request.
        known = {uid for uid, when in self.engine.ordered.items() if when > turn.uid} | {turn.uid}
        own = cause.engine == self.engine.name and cause.origins <= known
        ended = "a hold that was still to be read was ended by those of its own engine:"
        require(not own or not cause.origins, ended, cause.origins)

    # Actions.

    def pump(self) -> None:
        while self._actions:
            actions, self._actions[:] = list(self._actions), []
            for action in sorted(actions, key=lambda action: action.op is LoadAction.REPORT):
                self._perform(action)
        self._check_open()

    def _perform(self, action: Action) -> None:
        pull, op = self.pulls[action.load], action.op
        if op is LoadAction.REPORT:
            self._report(action, pull)
            return
        if op is LoadAction.COPY:
            items = list(zip(pull.turn.host, pull.turn.pages, strict=False))
            self.copies.append(BlockCopy(source=pull, items=items))
            pull.is_copying = True
            return
        link = pull.link
        if link is None:
            raise ProtocolViolation(f"{op} before the handshake")
        if op is LoadAction.CANCEL:
            for transfer in self.running(pull):
                transfer.cancelled |= transfer.rank == action.rank
        elif op in (LoadAction.DONE, LoadAction.ABANDON):
            self._tell(link, action, pull)
        else:
            require(not pull.reported, "a read after the report")
            self._check_order(action, pull)
            if op is LoadAction.READ:
                self._read_pages(link, action, pull)
                return
            message = None
            if op is LoadAction.FENCE:
                if pull.renewal is not None:
                    pull.settled.add(action.rank)
                    self._renewals.end_rank(pull.renewal, action.rank)
                if not pull.load.shared:
                    message = self._release(action.rank, pull, abandoned=False)
            self._read_word(link, action.rank, op, pull, pull.hold, message)

    def _check_order(self, action: Action, pull: Pull) -> None:
        running = [each for each in self.running(pull) if each.rank == action.rank]
        require(not running, "two transfers of one load from one rank")
        read = pull.reads.get(action.rank)
        if action.op is LoadAction.READ:
            require(read is None or pull.is_early, "read twice from one rank")
            remote = RemoteRank(rank=action.rank, reads=True)
            require(pull.pulls and remote in pull.remote_ranks, "read from a rank to be notified")
        elif action.op is LoadAction.FENCE:
            require(pull.is_last, "a fence before the ticket")
            is_final = read is not None and read.state is State.DONE
            require(is_final, "a fence before the data is final")
        elif not pull.is_early:
            require(not pull.issue.ticket.computed, "a check that the ticket makes needless")

    def _read_pages(self, link: Link, action: Action, pull: Pull) -> None:
        until = None if action.until is None else action.until // BLOCK
        transfer = Transfer(
            op=LoadAction.READ,
            link=link,
            rank=action.rank,
            load=pull,
            items=pull.wants()[action.since // BLOCK : until],
            take=self._take_page,
        )
        pull.reads[action.rank] = transfer
        self._post(transfer)

    def _take_page(self, item: tuple[int, int, Content], source: int) -> None:
        page, remote, _ = item
        found = self.producer().ranks[source].producer.readable[remote]
        self.pages.parts(page)[source] = found

    def _read_word(
        self,
        link: Link,
        rank: int,
        op: LoadAction | None,
        load: object,
        hold: Hold,
        message: Message | None,
    ) -> None:
        """Post a read of the word for a load or renewal, with a notification."""

        def take(_: object, source: int) -> None:
            producer = self.producer().ranks[source].producer
            table = producer.watermarks if op is LoadAction.WATERMARK else producer.words
            transfer.word = table[hold.slot]

        transfer = Transfer(
            op=op, link=link, rank=rank, load=load, items=[hold], take=take, message=message
        )
        self._post(transfer)

    def _post(self, transfer: Transfer) -> None:
        """Post a transfer; if that raises, its loads lose it at once."""
        self.transfers.append(transfer)
        try:
            self.world.fabric.post(transfer)
        except PeerLostError as exc:
            transfer.state, transfer.error = State.FAILED, exc
            self._hear(transfer)

    def _release(self, rank: int, pull: Pull, *, abandoned: bool) -> Message:
        release = Release(
            incarnation=pull.issue.ticket.incarnation,
            slot=pull.hold.slot,
            generation=pull.hold.generation,
            engine=self.engine.name,
            rank=self.rank,
            expected=self.expected[rank],
            abandoned=abandoned,
        )
        return self._note(rank, release, pull.turn.uid)

    def _note(self, rank: int, note: Note, origin: int) -> Message:
        return Message(
            sender=self.engine.name,
            to=self.engine.peer,
            rank=rank,
            note=note,
            origin=origin,
        )

    def _tell(self, link: Link, action: Action, pull: Pull) -> None:
        require(not self.running(pull), f"{action.op} while bytes may land")
        abandoned = action.op is LoadAction.ABANDON
        fits = bool(pull.causes) is abandoned or pull.is_early
        require(fits, f"{action.op}, but what happened was", pull.causes)
        require(action.rank not in pull.told, "a rank was told twice:", action.rank)
        pull.told.add(action.rank)
        if not link.broken:
            message = self._release(action.rank, pull, abandoned=abandoned)
            self.world.fabric.messages.append(message)

    def _report(self, action: Action, pull: Pull) -> None:
        require(not pull.reported, "reported twice by one rank")
        require(not self.running(pull), "reported while bytes may land")
        copying = any(copy.source is pull for copy in self.copies)
        require(not copying, "reported while its pages are copied")
        pull.reported = True
        self._stop_renewal(pull)
        self._check_reason(action.error, pull)
        self._check_told(pull, has_failed=action.error is not None)
        if action.error is None:
            require(pull.is_last, "over before the ticket")
            self._check_pages(pull)
        if pull.pulls:
            self._results.append((pull.turn, action.error))

    def _check_reason(self, error: KVFerryError | None, pull: Pull) -> None:
        first = pull.causes[0] if pull.causes else None
        if pull.is_early and isinstance(error, StaleError):
            ranks = [self.producer().ranks[remote.rank].producer for remote in pull.remote_ranks]
            ends = [rank.table.over.get(pull.hold) for rank in ranks]
            ended = any(end is not None and end.why != "dropped" for end in ends)
            require(ended, "failed without a reason:", error)
        elif isinstance(first, str):
            kind = DeadlineError if first is LATE else StaleError
            require(isinstance(error, kind), f"{first}, but reported", error)
        else:
            require(error is first, "reported", error, "but what happened was", first)

    def _check_told(self, pull: Pull, *, has_failed: bool = True) -> None:
        """Check which ranks got a message of their own."""
        # All pages are read and valid: nobody needs an "abandon".
        has_settled = pull.fenced >= {remote.rank for remote in pull.remote_ranks if remote.reads}
        everybody = not pull.pulls or (has_failed and not has_settled)
        remote_ranks = () if pull.load.shared else pull.remote_ranks
        told = {remote.rank for remote in remote_ranks if everybody or not remote.reads}
        require(pull.told == told, "told were", pull.told, "and to be told", told)

    def _check_open(self) -> None:
        """Check that the transfers of a failed load are ending, and the load is reported then."""
        for pull in self.pulls.values():
            reported = pull.load.reported
            require(reported is pull.reported, "a load that is not over, or reported:", reported)
            if not pull.causes or pull.reported:
                continue
            running = self.running(pull)
            require(bool(running), "failed and without transfers, but not reported")
            ending = all(t.cancelled for t in running)
            require(ending, "failed, but its transfers go on")

    # Renewals, which are sent as the endpoint sends them.

    def renewed(self) -> list[Pull]:
        """Return what is renewed over an open connection."""
        every = [*self.waiting, *self.pulls.values()]
        return [p for p in every if p.renewal is not None and p.link and not p.link.broken]

    def _start_renewal(self, pull: Pull, *, at_once: bool) -> None:
        pull.link = self.link
        pull.renewal = self._renewals.begin(
            self.remote_ranks, lease=LEASE, now=self.now(), at_once=at_once
        )

    def _stop_renewal(self, pull: Pull) -> None:
        if pull.renewal is not None:
            self._renewals.end(pull.renewal)
        pull.renewal = None

    def _may_renew(self, pull: Pull) -> bool:
        """Return whether the producer that runs now made the ticket; connect to that."""
        self._reach()
        try:
            self._check(pull.turn, pull.issue)
        except TicketError:
            return False
        return True

    def _renew(self) -> None:
        """Connect producers, and send the renewals and heartbeats that are due."""
        for pull in self.waiting:
            if pull.link is not None and pull.link.broken:
                self._stop_renewal(pull)
            if pull.renewal is None and not pull.gone and self._may_renew(pull):
                self._start_renewal(pull, at_once=True)
        due, overdue = self._renewals.take_due(self.now())
        for transfer in self.transfers:
            transfer.cancelled |= transfer.op is None and transfer.load in overdue
        me: dict[str, Any] = {"engine": self.engine.name, "life": self.engine.life}
        for ask in due:
            found = self._find(ask)
            if found is not None and found.link is not None:
                ticket = found.issue.ticket
                note = Renewal(
                    incarnation=ticket.incarnation,
                    slot=ticket.hold.slot,
                    generation=ticket.hold.generation,
                    **me,
                )
                message = self._note(ask.rank, note, found.turn.uid)
                self._read_word(found.link, ask.rank, None, ask, ticket.hold, message)
        if (renewed := self.renewed()) and self.now() >= self._next_heartbeat:
            self._next_heartbeat = self.now() + HEARTBEAT_SECONDS
            for incarnation in sorted({pull.issue.ticket.incarnation for pull in renewed}):
                beat = Heartbeat(incarnation=incarnation, **me)
                for remote in self.remote_ranks:
                    self.world.fabric.messages.append(self._note(remote.rank, beat, 0))

    def _find(self, ask: RenewalRequest) -> Pull | None:
        every = (*self.waiting, *self.pulls.values())
        return next((pull for pull in every if pull.renewal == ask.renewal), None)

    def _renewal_ended(self, ask: RenewalRequest, transfer: Transfer) -> None:
        if transfer.state is State.FAILED:
            self._renewals.read_ended(ask)
            return
        pull = self._find(ask)
        stands = pull is not None and pull.hold.stands(transfer.word)
        if not self._renewals.answered(ask, stands=stands):
            return
        if pull is None:
            raise ProtocolViolation("a renewal that has ended was answered")
        self._check_gone(pull.turn, pull.issue, transfer.rank)
        pull.gone = True
        self._stop_renewal(pull)
        if pull not in self.waiting:
            self._abort(pull, STALE, gone())

    # Copies to the device, where the cache is staged.

    def copy(self, copy: BlockCopy, pick: int = 0) -> None:
        """Let one host page of a copy reach the device."""
        page, block = copy.items.pop(pick)
        for target, _, wanted in copy.source.wants():
            got = self.host[page]
            require(target != page or got == wanted, "stale bytes reach the device:", got, wanted)
        self._device.blocks.put(block, self.host.parts(page))
        if not copy.items:
            self.copies.remove(copy)
            copy.source.load.copied()
            self.pump()

    def fail(self, copy: BlockCopy) -> None:
        self.copies.remove(copy)
        error = CopyError("the device is broken")
        copy.source.causes.append(error)
        copy.source.load.copied(error)
        self.pump()

    # What the simulation looks at.

    def running(self, pull: Pull) -> list[Transfer]:
        """Return a load's transfers that are not final, or whose end was not polled."""
        return [t for t in self.transfers if t.load is pull]

    def _check_pages(self, pull: Pull) -> None:
        for page, _, wanted in pull.wants():
            for remote in self.remote_ranks:
                got = self.pages.parts(page).get(remote.rank)
                require(got == wanted or not remote.reads, "stale bytes accepted:", got, wanted)

    def check_loaded(self, loaded: list[tuple[int, Content]]) -> None:
        """Check that blocks of a request still contain what was loaded."""
        for block, wanted in loaded:
            got = self._device.blocks[block]
            require(got == wanted, "stale bytes accepted:", got, wanted)

    def may_land(self, turn: Turn) -> bool:
        """Return whether bytes may yet land in a request's pages, or be copied to its blocks."""
        landing = [
            page
            for transfer in self.transfers
            if transfer.op is LoadAction.READ and not transfer.state.final
            for page, _, _ in transfer.items
        ]
        copied = any(copy.source.turn is turn for copy in self.copies)
        targets = turn.host if self.world.options.staged else turn.pages
        return copied or not set(landing).isdisjoint(targets)
