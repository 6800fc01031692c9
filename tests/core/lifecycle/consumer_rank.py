"""The consumer's half of a simulated rank: it performs the actions of real ``LoadMachine``s.

It does so as the endpoint does: actions in order, slot words of one producer rank in one batch,
"done" bound to a fence, a shared read cancelled only when no load wants it. With all that happens
to a load goes why it must fail (``causes``): it has to report the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

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
from kvferry.core.lifecycle.renewal_schedule import Renewals
from kvferry.core.lifecycle.ticket import check_against
from kvferry.core.messages import RankPayload
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import State
from tests.core.lifecycle.fabric import (
    Content,
    Link,
    Message,
    ProtocolViolation,
    Transfer,
    release,
    require,
)
from tests.core.lifecycle.producer_rank import BlockCopy, Device, Pages
from tests.core.lifecycle.rank_renewals import RankRenewals
from tests.core.lifecycle.turns import (
    BLOCK,
    LATE,
    LOAD_TIMEOUT,
    PAGES,
    STALE,
    Issue,
    LoadOrder,
    Step,
    Turn,
)
from tests.core.messages import altered

if TYPE_CHECKING:
    from tests.core.lifecycle.engine import Engine

Words = dict[tuple[Link, int, LoadAction], list[LoadId]]
"""The slot words, or watermarks, that are to be read, by the loads that wait for them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Pull:
    """One rank's part of a load, with what the checks need to know of it.

    Attributes:
        pulls: whether pages are read and the outcome is reported; if not, "done" is sent.
        shared: whether no "done" or "abandon" is sent.
        is_early: whether it began with a part; ``is_last`` says whether it has its ticket.
        causes: why it must fail, in order: errors, or ``STALE``, ``LATE``.
        reads: producer rank to the last transfer of its pages.
        told: producer ranks to which a "done" or "abandon" was sent that is not bound to a fence.
        fenced: producer ranks whose slot word has proven the pages valid.
    """

    turn: Turn
    issue: Issue
    pulls: bool
    shared: bool
    is_early: bool
    is_last: bool
    deadline: float
    remote_ranks: tuple[RemoteRank, ...] = ()
    link: Link | None = None
    causes: list[KVFerryError | str] = field(default_factory=list)
    reads: dict[int, Transfer] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)
    is_copying: bool = False
    reported: bool = False

    @property
    def hold(self) -> Hold:
        return self.issue.ticket.hold

    @property
    def targets(self) -> tuple[int, ...]:
        """Return the pages of this rank that are read into."""
        return self.turn.host or self.turn.pages

    def wants(self) -> list[tuple[int, int, Content]]:
        """Return the destination, the source and the expected content of each page."""
        if not self.pulls:
            return []
        contents, pages = self.issue.contents, self.issue.ticket.pages[0]
        pairs = list(zip(self.targets[: self.turn.wanted], pages, contents, strict=False))
        return pairs[self.turn.cached :]

    def add(self, cause: KVFerryError | str) -> None:
        if not self.is_copying:  # a copy to the device goes on, and may well succeed
            self.causes.append(cause)

    def has_settled(self) -> bool:
        """Return whether all pages are read and valid: nobody needs an "abandon"."""
        return self.fenced >= {remote.rank for remote in self.remote_ranks if remote.reads}


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
        self.loads: dict[LoadId, LoadMachine] = {}
        self.pulls: dict[LoadId, Pull] = {}
        self.renewals = RankRenewals(self, world.components.of(Renewals)())
        self.handshakes: list[LoadId] = []
        self.transfers: list[Transfer] = []
        self.copies: list[BlockCopy] = []
        self.heard: list[Callable[[], None]] = []
        self.link = Link(broken=True)
        self._actions: list[Action] = []
        self._results: list[tuple[Turn, KVFerryError | None]] = []
        self._payloads: list[RankPayload] = []
        self._producer = engine

    def producer(self) -> Engine:
        """Return the producer that runs now."""
        return self.world.engines[self.engine.peer]

    @property
    def open(self) -> list[Pull]:
        return [pull for pull in self.pulls.values() if not pull.reported]

    # The engine's step.

    def apply(self, step: Step) -> None:
        for turn, issue in step.prepares:
            self.renewals.prepare(turn, issue)
        for order in step.begins:
            self._begin(order)
        for turn in step.aborts:
            self._abort(turn)
        self.pump()

    def take_results(self) -> list[tuple[Turn, KVFerryError | None]]:
        results, self._results = self._results, []
        return results

    def answer(self, load_id: LoadId, error: KVFerryError | None = None) -> None:
        """Let the producer that runs now answer a handshake, or let the handshake fail."""
        self.handshakes.remove(load_id)
        if error is not None:
            self._on_handshake_failed(load_id, error)
        else:
            self.reach()
            self._on_connected(load_id)
        self.pump()
        if self.pulls[load_id].reported:
            self._check_told(self.pulls[load_id])

    def poll(self) -> None:
        for transfer in list(self.transfers):
            if transfer.op is None:
                if transfer.state.final:
                    self.transfers.remove(transfer)
                    self.renewals.hear(transfer)
            elif transfer.state is State.FAILING:
                self._each(transfer, self._failing)
            elif transfer.state is State.FAILED:
                self.transfers.remove(transfer)
                self._each(transfer, self._lost)
            elif transfer.state is State.DONE:
                self.transfers.remove(transfer)
                self._each(transfer, self._arrived)
        self.pump()

    def echo(self, events: int) -> None:
        """Repeat the last events, which loads must ignore."""
        for event in self.heard[-events:]:
            event()
        self.pump()

    def tick(self) -> None:
        now = self.now()
        for pull in self.open:
            if pull.is_last and now >= pull.deadline:
                pull.add(LATE)
        self.renewals.tick()
        for load in self.loads.values():
            load.tick(now)
        self.pump()

    # Begin and end.

    def _begin(self, order: LoadOrder) -> None:
        turn, ticket = order.turn, order.issue.ticket
        found = [each for each, pull in self.pulls.items() if pull.turn is turn and pull.pulls]
        if found:
            self._hear_part(found[0], order)
            return
        is_early = turn.follows is not None
        gone_before = order.is_prepared and not is_early and self.renewals.take(turn)
        if order.shared and not order.pulls:
            return
        deadline = self.now() + LOAD_TIMEOUT
        load_id = LoadId(len(self.loads) + 1)
        load = self.loads[load_id] = self.world.components.of(LoadMachine)(
            id=load_id,
            actions=self._actions,
            hold=ticket.hold,
            computed=ticket.computed,
            reads=order.pulls,
            deadline=deadline,
            shared=order.shared,
            tokens=0 if order.is_last else ticket.tokens,
            awaits_device=True,
            needs_copy=bool(self.world.options.staged),
        )
        self.pulls[load_id] = Pull(
            turn=turn,
            issue=order.issue,
            pulls=order.pulls,
            shared=order.shared,
            is_early=is_early,
            is_last=order.is_last,
            deadline=deadline,
        )
        if order.pulls:
            for page in turn.pages[turn.cached :]:  # vLLM zeroes new blocks
                self._device.queue(self._device.blocks.zero, page)
            self._device.queue(self._pass, load)
        if gone_before:
            self.abort(load_id, STALE, gone())
        if self.knows(ticket.incarnation):
            self._on_connected(load_id)
        else:
            self.handshakes.append(load_id)

    def _pass(self, load: LoadMachine) -> None:
        self._hear(load.passed)
        self.pump()

    def _hear_part(self, load_id: LoadId, order: LoadOrder) -> None:
        load, pull, ticket = self.loads[load_id], self.pulls[load_id], order.issue.ticket
        if pull.reported or pull.is_last:
            return
        pull.issue, pull.is_last = order.issue, order.is_last
        pull.deadline = self.now() + LOAD_TIMEOUT
        if order.is_last:
            load.finish(ticket.hold, computed=ticket.computed, deadline=pull.deadline)
        else:
            load.extend(ticket.hold, ticket.tokens, pull.deadline)

    def _abort(self, turn: Turn) -> None:
        for load_id, pull in self.pulls.items():
            if pull.turn is turn and pull.pulls and not pull.reported:
                error = KVFerryError("given up")
                self.abort(load_id, error, error)

    def abort(self, load_id: LoadId, cause: KVFerryError | str, error: KVFerryError) -> None:
        """Abort a load because of ``cause``."""
        self.pulls[load_id].add(cause)
        self._hear(partial(self.loads[load_id].abort, error))

    def handle_producer_death(self, *, failing: bool) -> None:
        """Handle the death of the producer: its loads fail without waiting for transfer errors."""
        error = PeerLostError("it missed its pings")
        link = self.link
        self.world.fabric.sever(link, failing=failing)
        for load_id, pull in self.pulls.items():
            if pull.link is link and not pull.reported:
                self.abort(load_id, error, error)
        self.pump()

    # The producer.

    def knows(self, incarnation: int) -> bool:
        known = bool(self._payloads) and self._payloads[0].incarnation == incarnation
        return known and not self.link.broken

    def reach(self) -> None:
        """Connect to the producer that runs now."""
        producer = self.producer()
        if producer.payloads is not self._payloads or self.link.broken:
            self.world.fabric.sever(self.link)
            self.link, self._payloads, self._producer = Link(), producer.payloads, producer

    def _on_connected(self, load_id: LoadId) -> None:
        pull = self.pulls[load_id]
        try:
            self.check(pull.turn, pull.issue)
        except TicketError as exc:
            ours = pull.issue.ticket.incarnation == self._payloads[0].incarnation
            require(pull.turn.forged or not ours, "refused a good ticket:", exc)
            self._on_handshake_failed(load_id, exc)
            return
        wanted = self.loads[load_id].is_wanted
        require(wanted is not (pull.reported or bool(pull.causes)), "wanted is", wanted)
        for page in pull.turn.host if wanted else ():
            self.host.zero(page)
        pull.link, pull.remote_ranks = self.link, self.remote_ranks
        if pull.pulls and wanted and not pull.is_early:
            self.renewals.begin(load_id, pull)
        unit = BLOCK if pull.is_early else 1
        self._hear(partial(self.loads[load_id].handshake_succeeded, self.remote_ranks, unit))

    def check(self, turn: Turn, issue: Issue) -> None:
        """Refuse a ticket that the producer did not make. Raises ``TicketError``."""
        ticket = issue.ticket
        if turn.forged:
            others = tuple(tuple(page % PAGES + 1 for page in ids) for ids in ticket.pages)
            ticket = altered(ticket, pages=others)
        limits, key = self._producer.page_limits, self._producer.ticket_key.public
        check_against(ticket, self._payloads, limits, ticket_key=key)

    def may_renew(self, turn: Turn, issue: Issue) -> bool:
        try:
            self.check(turn, issue)
        except TicketError:
            return False
        return True

    def _on_handshake_failed(self, load_id: LoadId, error: KVFerryError) -> None:
        self.pulls[load_id].add(error)
        self._hear(partial(self.loads[load_id].handshake_failed, error))

    # Events.

    def _hear(self, event: Callable[[], None]) -> None:
        event()
        self.heard.append(event)

    def _each(self, transfer: Transfer, hear: Callable[[LoadId, Transfer], None]) -> None:
        for load_id in transfer.loads:
            hear(load_id, transfer)

    def _failing(self, load_id: LoadId, transfer: Transfer) -> None:
        error = transfer.error or TransportError("failing")
        self.pulls[load_id].add(error)
        self._hear(partial(self.loads[load_id].failing, transfer.rank, error))

    def _lost(self, load_id: LoadId, transfer: Transfer) -> None:
        self._lose(load_id, transfer.rank, transfer.error or TransportError("failed"))

    def _lose(self, load_id: LoadId, rank: int, error: KVFerryError) -> None:
        self.pulls[load_id].add(error)
        self._hear(partial(self.loads[load_id].lost, rank, error))

    def _arrived(self, load_id: LoadId, transfer: Transfer) -> None:
        pull, load, rank = self.pulls[load_id], self.loads[load_id], transfer.rank
        word = transfer.words.get(load_id, 0)
        if transfer.op is LoadAction.READ:
            event = partial(load.pages_read, rank)
        elif transfer.op is LoadAction.WATERMARK:
            event = partial(load.watermark_read, rank, word)
        else:
            self._judge(pull, transfer, word)
            hear = load.fenced if transfer.op is LoadAction.FENCE else load.checked
            event = partial(hear, rank, word)
        # Not repeated, where it would look like the answer to the next read.
        if pull.is_early or (transfer.op is LoadAction.CHECK and word == pull.hold.computing):
            event()
        else:
            self._hear(event)

    def _judge(self, pull: Pull, transfer: Transfer, word: int) -> None:
        """Evaluate a slot word by the protocol; if it is stale, check that the hold has ended."""
        ticket, fence = pull.issue.ticket, transfer.op is LoadAction.FENCE
        stands = word >> 1 == ticket.hold.generation
        if stands and (word & 1 or not fence or ticket.computed):
            if fence and not pull.causes:
                pull.fenced.add(transfer.rank)
        elif not pull.is_early:  # else, the hold may not be taken on yet, or have been replaced
            pull.add(STALE)
            self.check_gone(pull.turn, pull.issue, transfer.rank)

    def check_gone(self, turn: Turn, issue: Issue, rank: int) -> None:
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
        words: Words = defaultdict(list)
        while self._actions:
            actions, self._actions[:] = list(self._actions), []
            for action in sorted(actions, key=lambda action: action.op is LoadAction.REPORT):
                self._perform(action, words)
        for (link, rank, op), load_ids in words.items():
            if load_ids:
                self.read_words(link, rank, op, load_ids)
        if words:
            self.pump()
        self._check_open()

    def _perform(self, action: Action, words: Words) -> None:
        pull, op = self.pulls[action.load], action.op
        if op is LoadAction.REPORT:
            self._report(action, pull)
            return
        if op is LoadAction.COPY:
            items = list(zip(pull.turn.host, pull.turn.pages, strict=False))
            self.copies.append(BlockCopy(source=action.load, items=items))
            pull.is_copying = True
            return
        link = pull.link
        if link is None:
            raise ProtocolViolation(f"{op} before the handshake")
        if op is LoadAction.CANCEL:
            self._cancel(action, words)
        elif op in (LoadAction.DONE, LoadAction.ABANDON):
            self._tell(link, action, pull)
        else:
            require(not pull.reported, "a read after the report")
            self._check_order(action, pull)
            if op is LoadAction.READ:
                self._read_pages(link, action, pull)
                return
            if op is LoadAction.FENCE:
                self.renewals.end_rank(action.load, action.rank)
            words[link, action.rank, op].append(action.load)

    def _check_order(self, action: Action, pull: Pull) -> None:
        running = [each for each in self.running(action.load) if each.rank == action.rank]
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
        transfer = self.make_read(link, action, pull.wants()[action.since // BLOCK : until])
        pull.reads[action.rank] = transfer
        self.post(transfer)

    def make_read(
        self, link: Link, action: Action, items: list[tuple[int, int, Content]]
    ) -> Transfer:
        """Return the read of a load's pages from one rank, without a notification."""
        return Transfer(
            op=LoadAction.READ,
            link=link,
            rank=action.rank,
            loads=(action.load,),
            items=items,
            take=self._take_page,
        )

    def read_words(self, link: Link, rank: int, op: LoadAction, load_ids: list[LoadId]) -> None:
        """Post one read of several loads' words; "done" is bound to a fence."""
        telling = [each for each in load_ids if op is LoadAction.FENCE and self.tells(each)]
        words: dict[LoadId, int] = {}

        def take(load_id: LoadId, source: int) -> None:
            producer = self.producer().ranks[source].producer
            table = producer.watermarks if op is LoadAction.WATERMARK else producer.words
            words[load_id] = table[self.pulls[load_id].hold.slot]

        transfer = Transfer(
            op=op,
            link=link,
            rank=rank,
            loads=tuple(load_ids),
            items=list(load_ids),
            take=take,
            words=words,
            message=self.message(rank, telling, abandoned=False) if telling else None,
        )
        self.post(transfer)

    def tells(self, load_id: LoadId) -> bool:
        return not self.pulls[load_id].shared

    def post(self, transfer: Transfer) -> None:
        """Post a transfer; if that raises, its loads lose it at once."""
        try:
            self.world.fabric.post(transfer)
        except PeerLostError as exc:
            transfer.state = State.FAILED
            for load_id in transfer.loads:
                self._lose(load_id, transfer.rank, exc)
        else:
            self.transfers.append(transfer)

    def message(self, rank: int, load_ids: list[LoadId], *, abandoned: bool) -> Message:
        pulls = [self.pulls[load_id] for load_id in load_ids]
        releases = [
            release(
                pull.issue.ticket.incarnation,
                pull.hold,
                engine=self.engine.name,
                rank=self.rank,
                expected=self.expected[rank],
                abandoned=abandoned,
            )
            for pull in pulls
        ]
        origins = tuple(pull.turn.uid for pull in pulls)
        return self.note(rank, encode(releases), origins)

    def note(self, rank: int, payload: bytes, origins: tuple[int, ...]) -> Message:
        to = self.engine.peer
        return Message(sender=self.engine.name, to=to, rank=rank, payload=payload, origins=origins)

    def _take_page(self, item: tuple[int, int, Content], source: int) -> None:
        page, remote, _ = item
        found = self.producer().ranks[source].producer.readable[remote]
        self.pages.parts(page)[source] = found

    def _cancel(self, action: Action, words: Words) -> None:
        for (_, rank, _), load_ids in words.items():
            if rank == action.rank and action.load in load_ids:
                load_ids.remove(action.load)
                self._lose(action.load, rank, KVFerryError("cancelled"))
        for transfer in self.running(action.load):
            if transfer.rank == action.rank:
                transfer.cancel(action.load)

    def _tell(self, link: Link, action: Action, pull: Pull) -> None:
        require(not self.running(action.load), f"{action.op} while bytes may land")
        abandoned = action.op is LoadAction.ABANDON
        fits = bool(pull.causes) is abandoned or pull.is_early
        require(fits, f"{action.op}, but what happened was", pull.causes)
        require(action.rank not in pull.told, "a rank was told twice:", action.rank)
        pull.told.add(action.rank)
        if not link.broken:
            message = self.message(action.rank, [action.load], abandoned=abandoned)
            self.world.fabric.messages.append(message)

    def _report(self, action: Action, pull: Pull) -> None:
        require(not pull.reported, "reported twice by one rank")
        require(not self.running(action.load), "reported while bytes may land")
        copying = any(copy.source == action.load for copy in self.copies)
        require(not copying, "reported while its pages are copied")
        pull.reported = True
        self.renewals.end(action.load)
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
        everybody = not pull.pulls or (has_failed and not pull.has_settled())
        remote_ranks = () if pull.shared else pull.remote_ranks
        told = {remote.rank for remote in remote_ranks if everybody or not remote.reads}
        require(pull.told == told, "told were", pull.told, "and to be told", told)

    def _check_open(self) -> None:
        """Check that the transfers of a failed load are ending, and the load is reported then."""
        for load_id, pull in self.pulls.items():
            reported = self.loads[load_id].reported
            require(reported is pull.reported, "a load that is not over, or reported:", reported)
            if not pull.causes or pull.reported:
                continue
            running = self.running(load_id)
            require(bool(running), "failed and without transfers, but not reported")
            ending = all(load_id not in t.wanted for t in running)
            require(ending, "failed, but its transfers go on")

    # Copies to the device, where the cache is staged.

    def copy(self, copy: BlockCopy, pick: int = 0) -> None:
        """Let one host page of a copy reach the device."""
        page, block = copy.items.pop(pick)
        pull = self.pulls[copy.source]
        for target, _, wanted in pull.wants():
            got = self.host[page]
            require(target != page or got == wanted, "stale bytes reach the device:", got, wanted)
        self._device.blocks.put(block, self.host.parts(page))
        if not copy.items:
            self.copies.remove(copy)
            self._hear(self.loads[self.copied(copy)].copied)
            self.pump()

    def copied(self, copy: BlockCopy) -> LoadId:
        load_id: LoadId = copy.source
        return load_id

    def fail(self, copy: BlockCopy) -> None:
        self.copies.remove(copy)
        error = CopyError("the device is broken")
        self.pulls[copy.source].causes.append(error)
        self._hear(partial(self.loads[copy.source].copied, error))
        self.pump()

    # What the simulation looks at.

    def running(self, load_id: LoadId) -> list[Transfer]:
        """Return a load's transfers that are not final, or whose end was not polled."""
        return [t for t in self.transfers if load_id in t.loads]

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
        copied = any(self.pulls[copy.source].turn is turn for copy in self.copies)
        targets = turn.host if self.world.options.staged else turn.pages
        return copied or not set(landing).isdisjoint(targets)
