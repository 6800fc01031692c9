"""A rank of the simulated decode engine: it performs the actions of real ``LoadMachine``s.

It does so as the endpoint does: actions in order, slot words of one producer rank in one batch,
"done" bound to a fence, a shared read cancelled only when no load wants it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvferry.core.errors import (
    DeadlineError,
    KVFerryError,
    PeerLostError,
    StaleError,
    TicketError,
    TransportError,
)
from kvferry.core.lifecycle.load_machine import Action, LoadAction, LoadId, RemoteRank, gone
from kvferry.core.lifecycle.renewal_schedule import Renewals
from kvferry.core.lifecycle.ticket import check_against, page_limits
from kvferry.core.messages import RankPayload
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import State
from tests.core.lifecycle.decode_requests import (
    LATE,
    STALE,
    DecodeRequest,
    LoadOrder,
    RankLoad,
    StepMetadata,
)
from tests.core.lifecycle.fabric import (
    Content,
    Link,
    Message,
    ProtocolViolation,
    Transfer,
    release,
    require,
)
from tests.core.lifecycle.producer import LOAD_TIMEOUT, PAGES, Producer, skewed
from tests.core.lifecycle.rank_renewals import RankRenewals
from tests.core.lifecycle.schedulers import RankLoads

if TYPE_CHECKING:
    from tests.core.lifecycle.consumer import Consumer


class ConsumerRank:
    """One rank: its memory, its loads, and the work of an endpoint."""

    def __init__(self, consumer: Consumer, rank: int) -> None:
        self._simulation = simulation = consumer.simulation
        self.engine, self.life, self.rank = consumer.name, consumer.life, rank
        self.remote_ranks = consumer.plan[rank]
        remotes = [remote.rank for remote_ranks in consumer.plan for remote in remote_ranks]
        self.expected = {remote: remotes.count(remote) for remote in remotes}
        self._ordered = consumer.ordered
        self.loads = RankLoads(simulation.components)
        self.rank_renewals = RankRenewals(self, simulation.components.of(Renewals)())
        self.fabric = simulation.fabric
        self.now = skewed(lambda: simulation.now, -500.0 * rank)
        self.pages: list[dict[int, Content | None]] = [{} for _ in range(PAGES + 1)]
        self.inbox: deque[StepMetadata] = deque()
        self.pulls: dict[LoadId, RankLoad] = {}
        self.handshakes: list[LoadId] = []
        self.transfers: list[Transfer] = []
        self.heard: list[Callable[[], None]] = []
        self.results: list[tuple[DecodeRequest, KVFerryError | None]] = []
        self._link = Link(broken=True)
        self._payloads: list[RankPayload] = []
        self._ticket_key = b""

    def producer(self) -> Producer:
        return self._simulation.producer

    # The engine's step.

    def launch(self) -> None:
        step = self.inbox.popleft()
        for request in step.prepares:
            self.rank_renewals.prepare(request)
        for order in step.begins:
            self._begin(order)
        for request in step.aborts:
            self._abort(request)
        self.results.extend(step.refusals)
        step.outputs[self.rank], self.results = self.results, []
        self._pump()

    def answer(self, load_id: LoadId, error: KVFerryError | None = None) -> None:
        """Let the producer that runs now answer a handshake, or let the handshake fail."""
        self.handshakes.remove(load_id)
        if error is not None:
            self._on_handshake_failed(load_id, error)
        else:
            self._connect(self.producer().payloads)
            self._on_connected(load_id)
        self._pump()
        if self.pulls[load_id].reported:
            self._check_told(self.pulls[load_id])

    def poll(self) -> None:
        for transfer in list(self.transfers):
            if transfer.op is None:
                if transfer.state.final:
                    self.transfers.remove(transfer)
                    self.rank_renewals.hear(transfer)
            elif transfer.state is State.FAILING:
                self._each(transfer, self._failing)
            elif transfer.state is State.FAILED:
                self.transfers.remove(transfer)
                self._each(transfer, self._lost)
            elif transfer.state is State.DONE:
                self.transfers.remove(transfer)
                self._each(transfer, self._arrived)
        self._pump()

    def echo(self, events: int) -> None:
        """Repeat the last events, which loads must ignore."""
        for event in self.heard[-events:]:
            event()
        self._pump()

    def tick(self) -> None:
        now = self.now()
        for pull in self.pulls.values():
            if not pull.reported and now >= pull.deadline:
                pull.causes.append(LATE)
        self.rank_renewals.tick()
        self.loads.tick(now)
        self._pump()

    # Begin and end.

    def _begin(self, order: LoadOrder) -> None:
        request, ticket = order.request, order.request.issue.ticket
        gone_before = order.prepared and self.rank_renewals.take(request)
        if order.shared and not order.pulling:
            return
        deadline = self.now() + LOAD_TIMEOUT
        load_id = self.loads.begin(
            hold=ticket.hold,
            computed=ticket.computed,
            reads=order.pulling,
            deadline=deadline,
            shared=order.shared,
        )
        require(load_id not in self.pulls, "a load id came back")
        pull = RankLoad(
            request=request,
            pulling=order.pulling,
            shared=order.shared,
            deadline=deadline,
            wants=_wants(request),
        )
        self.pulls[load_id] = pull
        request.pulls[self.rank] = pull
        if gone_before:
            self.abort(load_id, STALE, gone())
        if self.knows(ticket.incarnation):
            self._on_connected(load_id)
        else:
            self.handshakes.append(load_id)

    def _abort(self, request: DecodeRequest) -> None:
        for load_id, pull in self.pulls.items():
            if pull.request is request and pull.pulling and not pull.reported:
                error = KVFerryError("given up")
                self.abort(load_id, error, error)

    def abort(self, load_id: LoadId, cause: KVFerryError | str, error: KVFerryError) -> None:
        """Abort a load because of ``cause``."""
        self.pulls[load_id].causes.append(cause)
        self._hear(partial(self.loads[load_id].abort, error))

    def handle_producer_death(self, *, failing: bool) -> None:
        """Handle the death of the producer: its loads fail without waiting for transfer errors."""
        error = PeerLostError("it missed its pings")
        link = self._link
        self.fabric.sever(link, failing=failing)
        for load_id, pull in self.pulls.items():
            if pull.link is link and not pull.reported:
                self.abort(load_id, error, error)
        self._pump()

    # The producer.

    @property
    def link(self) -> Link:
        return self._link

    def knows(self, incarnation: int) -> bool:
        known = bool(self._payloads) and self._payloads[0].incarnation == incarnation
        return known and not self._link.broken

    def reach(self) -> None:
        self._connect(self.producer().payloads)

    def _connect(self, payloads: list[RankPayload]) -> None:
        if payloads is not self._payloads or self._link.broken:
            self.fabric.sever(self._link)
            self._link, self._payloads = Link(), payloads
            self._ticket_key = self.producer().ticket_key.public

    def _on_connected(self, load_id: LoadId) -> None:
        pull = self.pulls[load_id]
        try:
            self.check(pull.request)
        except TicketError as exc:
            ours = pull.request.issue.ticket.incarnation == self._payloads[0].incarnation
            require(pull.request.forged or not ours, "refused a good ticket:", exc)
            self._on_handshake_failed(load_id, exc)
            return
        wanted = self.loads[load_id].is_wanted
        require(wanted is not (pull.reported or bool(pull.causes)), "wanted is", wanted)
        for page, _, _ in pull.wants if wanted else ():
            self.pages[page] = {}  # zeroed
        pull.link, pull.remote_ranks = self._link, self.remote_ranks
        if pull.pulling and wanted:
            self.rank_renewals.begin(load_id, pull.request)
        self._hear(partial(self.loads[load_id].handshake_succeeded, self.remote_ranks))

    def check(self, request: DecodeRequest) -> None:
        """Refuse a ticket that the producer did not make. Raises ``TicketError``."""
        limits = page_limits(self._payloads)
        check_against(request.ticket, self._payloads, limits, ticket_key=self._ticket_key)

    def may_renew(self, request: DecodeRequest) -> bool:
        try:
            self.check(request)
        except TicketError:
            return False
        return True

    def _on_handshake_failed(self, load_id: LoadId, error: KVFerryError) -> None:
        self.pulls[load_id].causes.append(error)
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
        self.pulls[load_id].causes.append(error)
        self._hear(partial(self.loads[load_id].failing, transfer.rank, error))

    def _lost(self, load_id: LoadId, transfer: Transfer) -> None:
        error = transfer.error or TransportError("failed")
        self._lose(load_id, transfer.rank, error)

    def _lose(self, load_id: LoadId, rank: int, error: KVFerryError) -> None:
        self.pulls[load_id].causes.append(error)
        self._hear(partial(self.loads[load_id].lost, rank, error))

    def _arrived(self, load_id: LoadId, transfer: Transfer) -> None:
        if transfer.op is LoadAction.READ:
            self._hear(partial(self.loads[load_id].pages_read, transfer.rank))
            return
        pull, word = self.pulls[load_id], transfer.words[load_id]
        self._judge(pull, transfer, word)
        checked = partial(self.loads[load_id].checked, transfer.rank, word)
        if transfer.op is LoadAction.FENCE:
            self._hear(partial(self.loads[load_id].fenced, transfer.rank, word))
        elif word == pull.request.issue.ticket.hold.computing:
            checked()  # not repeated: it would look like the answer to the next check
        else:
            self._hear(checked)

    def _judge(self, pull: RankLoad, transfer: Transfer, word: int) -> None:
        """Evaluate a slot word by the protocol; if it is stale, check that the hold has ended."""
        ticket, fence = pull.request.issue.ticket, transfer.op is LoadAction.FENCE
        stands = word >> 1 == ticket.hold.generation
        if stands and (word & 1 or not fence or ticket.computed):
            return
        pull.causes.append(STALE)
        self.check_gone(pull.request, transfer.rank)

    def check_gone(self, request: DecodeRequest, rank: int) -> None:
        """Check that a hold that was read as gone has ended, and not by this engine itself."""
        producer = self.producer()
        if request.issue.producer is not producer:
            return
        cause = producer.ranks[rank].table.over.get(request.issue.ticket.hold)
        if cause is None:
            raise ProtocolViolation("an active hold was read as stale")
        # The requests whose "done" this incarnation sent or ordered after it knew of the request.
        known = {uid for uid, when in self._ordered.items() if when > request.uid} | {request.uid}
        own = cause.engine == self.engine and cause.origins <= known
        ended = "a hold that was still to be read was ended by those of its own engine:"
        require(not own or not cause.origins, ended, cause.origins)

    # Actions.

    def _pump(self) -> None:
        words: dict[tuple[Link, int, LoadAction], list[LoadId]] = defaultdict(list)
        while actions := self.loads.take():
            for action in sorted(actions, key=lambda action: action.op is LoadAction.REPORT):
                self._perform(action, words)
        for (link, rank, op), load_ids in words.items():
            if load_ids:
                self.read_words(link, rank, op, load_ids)
        if words:
            self._pump()
        open_pulls = sum(not pull.reported for pull in self.pulls.values())
        require(self.loads.open == open_pulls, "loads that are not over:", open_pulls)
        self._check_failing()

    def _perform(
        self, action: Action, words: dict[tuple[Link, int, LoadAction], list[LoadId]]
    ) -> None:
        pull = self.pulls[action.load]
        if action.op is LoadAction.REPORT:
            self._report(action, pull)
            return
        link = pull.link
        if link is None:
            raise ProtocolViolation(f"{action.op} before the handshake")
        if action.op is LoadAction.READ:
            require(not pull.reported, "a read after the report")
            self.read_pages(link, action, pull)
        elif action.op in (LoadAction.CHECK, LoadAction.FENCE):
            require(not pull.reported, "a check after the report")
            self._check_order(action, pull)
            if action.op is LoadAction.FENCE:
                self.rank_renewals.end_rank(action.load, action.rank)
            words[link, action.rank, action.op].append(action.load)
        elif action.op is LoadAction.CANCEL:
            self._cancel(action, words)
        else:
            self._tell(link, action, pull)

    def _check_order(self, action: Action, pull: RankLoad) -> None:
        if action.op is LoadAction.CHECK:
            computed = pull.request.issue.ticket.computed
            require(not computed, "a check that the ticket makes needless")
        else:
            read = pull.reads.get(action.rank)
            final = read is not None and read.state is State.DONE
            require(final, "a fence before the data is final")

    def read_pages(self, link: Link, action: Action, pull: RankLoad) -> None:
        """Post the read of a load's pages from one rank, without a notification."""
        require(action.rank not in pull.reads, "read twice from one rank")
        wanted = pull.pulling and RemoteRank(rank=action.rank, reads=True) in pull.remote_ranks
        require(wanted, "read from a rank that is only notified")
        transfer = self.make_read(link, action, pull)
        pull.reads[action.rank] = transfer
        self.post(transfer)

    def make_read(self, link: Link, action: Action, pull: RankLoad) -> Transfer:
        return Transfer(
            op=LoadAction.READ,
            link=link,
            rank=action.rank,
            loads=(action.load,),
            items=list(pull.wants),
            take=self._take_page,
        )

    def read_words(self, link: Link, rank: int, op: LoadAction, load_ids: list[LoadId]) -> None:
        """Post one read of several loads' slot words; "done" is bound to a fence."""
        message = None
        if telling := [
            load_id for load_id in load_ids if op is LoadAction.FENCE and self.tells(load_id)
        ]:
            message = self.message(rank, telling, abandoned=False)
        words: dict[LoadId, int] = {}

        def take(load_id: LoadId, source: int) -> None:
            slot = self.pulls[load_id].request.issue.ticket.hold.slot
            words[load_id] = self.producer().ranks[source].words[slot]

        transfer = Transfer(
            op=op,
            link=link,
            rank=rank,
            loads=tuple(load_ids),
            items=list(load_ids),
            take=take,
            words=words,
            message=message,
        )
        self.post(transfer)

    def tells(self, load_id: LoadId) -> bool:
        return not self.pulls[load_id].shared

    def post(self, transfer: Transfer) -> None:
        """Post a transfer; if that raises, its loads lose it at once."""
        try:
            self.fabric.post(transfer)
        except PeerLostError as exc:
            transfer.state = State.FAILED
            for load_id in transfer.loads:
                self._lose(load_id, transfer.rank, exc)
        else:
            self.transfers.append(transfer)

    def message(self, rank: int, load_ids: list[LoadId], *, abandoned: bool) -> Message:
        tickets = [self.pulls[load_id].request.issue.ticket for load_id in load_ids]
        releases = [
            release(
                ticket.incarnation,
                ticket.hold,
                engine=self.engine,
                rank=self.rank,
                expected=self.expected[rank],
                abandoned=abandoned,
            )
            for ticket in tickets
        ]
        origins = tuple(self.pulls[load_id].request.uid for load_id in load_ids)
        return Message(sender=self.engine, rank=rank, payload=encode(releases), origins=origins)

    def _take_page(self, item: tuple[int, int, Content], source: int) -> None:
        page, remote, _ = item
        self.pages[page][source] = self.producer().ranks[source].pages[remote]

    def _cancel(
        self, action: Action, words: dict[tuple[Link, int, LoadAction], list[LoadId]]
    ) -> None:
        for (_, rank, _), load_ids in words.items():
            if rank == action.rank and action.load in load_ids:
                load_ids.remove(action.load)
                self._lose(action.load, rank, KVFerryError("cancelled"))
        for transfer in self.running(action.load):
            if transfer.rank == action.rank:
                transfer.cancel(action.load)

    def _tell(self, link: Link, action: Action, pull: RankLoad) -> None:
        require(not self.running(action.load), f"{action.op} while bytes may land")
        abandoned = action.op is LoadAction.ABANDON
        require(bool(pull.causes) is abandoned, f"{action.op}, but what happened was", pull.causes)
        require(action.rank not in pull.told, "a rank was told twice:", action.rank)
        pull.told.add(action.rank)
        if not link.broken:
            message = self.message(action.rank, [action.load], abandoned=abandoned)
            self.fabric.messages.append(message)

    def _report(self, action: Action, pull: RankLoad) -> None:
        require(not pull.reported, "reported twice by one rank")
        require(not self.running(action.load), "reported while bytes may land")
        pull.reported = True
        self.rank_renewals.end(action.load)
        self._check_reason(action.error, pull)
        self._check_told(pull)
        if action.error is None:
            self.check_pages(pull)
        if pull.pulling:
            self.results.append((pull.request, action.error))

    def _check_reason(self, error: KVFerryError | None, pull: RankLoad) -> None:
        first = pull.causes[0] if pull.causes else None
        if isinstance(first, str):
            kind = DeadlineError if first is LATE else StaleError
            require(isinstance(error, kind), f"{first}, but reported", error)
        else:
            require(error is first, "reported", error, "but what happened was", first)

    def _check_told(self, pull: RankLoad) -> None:
        """Check which ranks got a message of their own."""
        everybody = bool(pull.causes) or not pull.pulling
        remote_ranks = () if pull.shared else pull.remote_ranks
        told = {remote.rank for remote in remote_ranks if everybody or not remote.reads}
        require(pull.told == told, "told were", pull.told, "and to be told", told)

    def _check_failing(self) -> None:
        """Check that the transfers of a failed load are ending, and the load is reported then."""
        for load_id, pull in self.pulls.items():
            if not pull.causes or pull.reported:
                continue
            running = self.running(load_id)
            require(bool(running), "failed and without transfers, but not reported")
            ending = all(load_id not in t.wanted for t in running)
            require(ending, "failed, but its transfers go on")

    # What the simulation looks at.

    def running(self, load_id: LoadId) -> list[Transfer]:
        """Return a load's transfers that are not final, or whose end was not polled."""
        return [t for t in self.transfers if load_id in t.loads]

    def check_pages(self, pull: RankLoad) -> None:
        if not pull.pulling:
            return
        for page, _, wanted in pull.wants:
            for remote in self.remote_ranks:
                got = self.pages[page].get(remote.rank)
                require(got == wanted or not remote.reads, "stale bytes accepted:", got, wanted)

    def sever(self, *, failing: bool) -> None:
        self.fabric.sever(self._link, failing=failing)

    def crash(self) -> None:
        for transfer in self.transfers:
            self.fabric.drop(transfer)


def _wants(request: DecodeRequest) -> list[tuple[int, int, Content]]:
    prompt, sources = request.issue.prompt, request.issue.ticket.pages[0]
    wants = [
        (page, source, prompt.content(index))
        for index, (page, source) in enumerate(zip(request.pages, sources, strict=False))
    ]
    return wants[request.cached :]
