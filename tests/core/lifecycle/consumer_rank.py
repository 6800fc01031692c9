"""A rank of the model's decode engine: it performs what the real ``Loads`` asks for.

The glue is the endpoint's: actions in order, slot words of one producer rank in one batch, "done"
bound to a fence, a shared read cancelled only when nobody wants it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

from kvferry.core.errors import (
    DeadlineError,
    KVFerryError,
    PeerLostError,
    StaleError,
    TicketError,
    TransportError,
)
from kvferry.core.lifecycle.loads import Action, LoadAction, LoadId, Loads, RemoteRank, gone
from kvferry.core.lifecycle.renewals import Renewals
from kvferry.core.lifecycle.ticket import check_against, page_limits
from kvferry.core.messages import RankPayload, Release, encode
from kvferry.core.transport import State
from tests.core.lifecycle.decodes import LATE, STALE, Decode, Meta, Order, Pull
from tests.core.lifecycle.fabric import Content, Fabric, Link, Message, Transfer, Violation, require
from tests.core.lifecycle.producer import LOAD_TIMEOUT, PAGES, Producer
from tests.core.lifecycle.renewing import Renewing


class ConsumerRank:
    """One rank: its memory, its machine, and the glue that an endpoint is."""

    def __init__(
        self,
        *,
        engine: str,
        rank: int,
        parties: tuple[RemoteRank, ...],
        expected: dict[int, int],
        ordered: dict[int, int],
        loads: type[Loads],
        renewals: type[Renewals],
        life: int,
        fabric: Fabric,
        producer: Callable[[], Producer],
        now: Callable[[], float],
    ) -> None:
        self.engine = engine
        self.life = life
        self.rank = rank
        self.parties = parties
        self.expected = expected
        self._ordered = ordered
        self.loads = loads()
        self.renewing = Renewing(self, renewals)
        self.fabric = fabric
        self.producer = producer
        self.now = now
        self.pages: list[dict[int, Content | None]] = [{} for _ in range(PAGES + 1)]
        self.inbox: deque[Meta] = deque()
        self.pulls: dict[LoadId, Pull] = {}
        self.shaking: list[LoadId] = []
        self.transfers: list[Transfer] = []
        self.heard: list[Callable[[], None]] = []
        self.results: list[tuple[Decode, KVFerryError | None]] = []
        self._link = Link(broken=True)
        self._payloads: list[RankPayload] = []
        self._ticket_key = b""

    # The engine's step.

    def launch(self) -> None:
        """Take a step: begin and abort loads, hand over results."""
        step = self.inbox.popleft()
        for request in step.prepares:
            self.renewing.prepare(request)
        for order in step.begins:
            self._begin(order)
        for request in step.aborts:
            self._abort(request)
        self.results.extend(step.refusals)
        step.outputs[self.rank], self.results = self.results, []
        self._pump()

    def answer(self, load_id: LoadId, error: KVFerryError | None = None) -> None:
        """The producer that lives now answers a handshake, or it fails."""
        self.shaking.remove(load_id)
        if error is not None:
            self._unshaken(load_id, error)
        else:
            self._connect(self.producer().payloads)
            self._on_connected(load_id)
        self._pump()
        if self.pulls[load_id].reported:
            self._check_told(self.pulls[load_id])

    def poll(self) -> None:
        """Hear of all transfers what there is to hear, then act."""
        for transfer in list(self.transfers):
            if transfer.op is None:
                if transfer.state.final:
                    self.transfers.remove(transfer)
                    self.renewing.hear(transfer)
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
        """The machine hears once more of the last events; it is to ignore that."""
        for event in self.heard[-events:]:
            event()
        self._pump()

    def tick(self) -> None:
        """The machine looks at the clock."""
        now = self.now()
        for pull in self.pulls.values():
            if not pull.reported and now >= pull.deadline:
                pull.causes.append(LATE)
        self.renewing.tick()
        self.loads.tick(now)
        self._pump()

    # Begin and end.

    def _begin(self, order: Order) -> None:
        request, ticket = order.request, order.request.issue.ticket
        gone_before = order.prepared and self.renewing.take(request)
        if order.shared and not order.pulling:
            return
        deadline = self.now() + LOAD_TIMEOUT
        load_id = self.loads.begin(
            request.id,
            ticket.hold,
            computed=ticket.computed,
            reads=order.pulling,
            deadline=deadline,
            shared=order.shared,
        )
        require(load_id not in self.pulls, "a load id came back")
        pull = Pull(
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
            self.shaking.append(load_id)

    def _abort(self, request: Decode) -> None:
        for load_id, pull in self.pulls.items():
            if pull.request is request and pull.pulling and not pull.reported:
                error = KVFerryError("given up")
                self.abort(load_id, error, error)

    def abort(self, load_id: LoadId, cause: KVFerryError | str, error: KVFerryError) -> None:
        """A load is given up, because of ``cause``."""
        self.pulls[load_id].causes.append(cause)
        self._hear(partial(self.loads.abort, load_id, error))

    def part(self, *, failing: bool) -> None:
        """The producer is found dead: nothing of its loads may wait for a transfer's error."""
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
        """The connection to the producer."""
        return self._link

    def knows(self, incarnation: int) -> bool:
        """Whether this start of the producer is connected."""
        known = bool(self._payloads) and self._payloads[0].incarnation == incarnation
        return known and not self._link.broken

    def reach(self) -> None:
        """Shake hands with the producer that lives now."""
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
            self._unshaken(load_id, exc)
            return
        wanted = self.loads.wanted(load_id)
        require(wanted is not (pull.reported or bool(pull.causes)), "wanted is", wanted)
        for page, _, _ in pull.wants if wanted else ():
            self.pages[page] = {}  # zeroed
        pull.link, pull.parties = self._link, self.parties
        if pull.pulling and wanted:
            self.renewing.begin(load_id, pull.request)
        self._hear(partial(self.loads.handshake_succeeded, load_id, self.parties))

    def check(self, request: Decode) -> None:
        """Refuse a ticket that the producer did not make. Raises ``TicketError``."""
        limits = page_limits(self._payloads)
        check_against(request.ticket, self._payloads, limits, ticket_key=self._ticket_key)

    def may_renew(self, request: Decode) -> bool:
        """Whether the hold of a request that waits may be renewed."""
        try:
            self.check(request)
        except TicketError:
            return False
        return True

    def _unshaken(self, load_id: LoadId, error: KVFerryError) -> None:
        self.pulls[load_id].causes.append(error)
        self._hear(partial(self.loads.handshake_failed, load_id, error))

    # What the machine hears.

    def _hear(self, event: Callable[[], None]) -> None:
        event()
        self.heard.append(event)

    def _each(self, transfer: Transfer, hear: Callable[[LoadId, Transfer], None]) -> None:
        for load_id in transfer.loads:
            hear(load_id, transfer)

    def _failing(self, load_id: LoadId, transfer: Transfer) -> None:
        error = transfer.error or TransportError("failing")
        self.pulls[load_id].causes.append(error)
        self._hear(partial(self.loads.failing, load_id, transfer.rank, error))

    def _lost(self, load_id: LoadId, transfer: Transfer) -> None:
        error = transfer.error or TransportError("failed")
        self._lose(load_id, transfer.rank, error)

    def _lose(self, load_id: LoadId, rank: int, error: KVFerryError) -> None:
        self.pulls[load_id].causes.append(error)
        self._hear(partial(self.loads.lost, load_id, rank, error))

    def _arrived(self, load_id: LoadId, transfer: Transfer) -> None:
        if transfer.op is LoadAction.READ:
            self._hear(partial(self.loads.read, load_id, transfer.rank))
            return
        pull, word = self.pulls[load_id], transfer.words[load_id]
        self._judge(pull, transfer, word)
        checked = partial(self.loads.checked, load_id, transfer.rank, word)
        if transfer.op is LoadAction.FENCE:
            self._hear(partial(self.loads.fenced, load_id, transfer.rank, word))
        elif word == pull.request.issue.ticket.hold.computing:
            checked()  # an echo could not be told from the answer to the next check
        else:
            self._hear(checked)

    def _judge(self, pull: Pull, transfer: Transfer, word: int) -> None:
        """What a slot word means, by the table; a hold must have had a reason to be gone."""
        ticket, fence = pull.request.issue.ticket, transfer.op is LoadAction.FENCE
        stands = word >> 1 == ticket.hold.generation
        if stands and (word & 1 or not fence or ticket.computed):
            return
        pull.causes.append(STALE)
        self.check_gone(pull.request, transfer.rank)

    def check_gone(self, request: Decode, rank: int) -> None:
        """A hold that was read as gone has a reason to be."""
        producer = self.producer()
        if request.issue.producer is not producer:
            return
        cause = producer.ranks[rank].book.over.get(request.issue.ticket.hold)
        if cause is None:
            raise Violation("a hold that stands was read as stale")
        # Every "done" that this life of the engine said or ordered when it knew of the request.
        known = {uid for uid, when in self._ordered.items() if when > request.uid} | {request.uid}
        own = cause.engine == self.engine and cause.origins <= known
        ended = "a hold that was still to be read was ended by those of its own engine:"
        require(not own or not cause.origins, ended, cause.origins)

    # What the machine asks for.

    def _pump(self) -> None:
        words: dict[tuple[Link, int, LoadAction], list[LoadId]] = defaultdict(list)
        while actions := self.loads.take_actions():
            for action in sorted(actions, key=lambda action: action.op is LoadAction.REPORT):
                self._perform(action, words)
        for (link, rank, op), load_ids in words.items():
            if load_ids:
                self.read_words(link, rank, op, load_ids)
        if words:
            self._pump()
        open_pulls = sum(not pull.reported for pull in self.pulls.values())
        require(len(self.loads) == open_pulls, "loads that are not over:", open_pulls)
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
            raise Violation(f"{action.op} before the handshake")
        if action.op is LoadAction.READ:
            require(not pull.reported, "a read after the report")
            self.read_pages(link, action, pull)
        elif action.op in (LoadAction.CHECK, LoadAction.FENCE):
            require(not pull.reported, "a check after the report")
            self._check_order(action, pull)
            if action.op is LoadAction.FENCE:
                self.renewing.settle(action.load, action.rank)
            words[link, action.rank, action.op].append(action.load)
        elif action.op is LoadAction.CANCEL:
            self._cancel(action, words)
        else:
            self._tell(link, action, pull)

    def _check_order(self, action: Action, pull: Pull) -> None:
        if action.op is LoadAction.CHECK:
            computed = pull.request.issue.ticket.computed
            require(not computed, "a check that the ticket makes needless")
        else:
            read = pull.reads.get(action.rank)
            final = read is not None and read.state is State.DONE
            require(final, "a fence before the data is final")

    def read_pages(self, link: Link, action: Action, pull: Pull) -> None:
        """Post the read of a load's pages from one rank. Nothing is bound to it."""
        require(action.rank not in pull.reads, "read twice from one rank")
        wanted = pull.pulling and RemoteRank(rank=action.rank, reads=True) in pull.parties
        require(wanted, "read from a rank that is only to be told")
        transfer = self.make_read(link, action, pull)
        pull.reads[action.rank] = transfer
        self.post(transfer)

    def make_read(self, link: Link, action: Action, pull: Pull) -> Transfer:
        """The read of a load's pages from one rank."""
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
        """Whether "done" is bound to a load's fences."""
        return not self.pulls[load_id].shared

    def post(self, transfer: Transfer) -> None:
        """Give a transfer to the fabric; where that raises, the loads hear of it at once."""
        try:
            self.fabric.post(transfer)
        except PeerLostError as exc:
            transfer.state = State.FAILED
            for load_id in transfer.loads:
                self._lose(load_id, transfer.rank, exc)
        else:
            self.transfers.append(transfer)

    def message(self, rank: int, load_ids: list[LoadId], *, abandoned: bool) -> Message:
        """The "done" or "abandon" of some loads to one producer rank."""
        releases = []
        for load_id in load_ids:
            ticket = self.pulls[load_id].request.issue.ticket
            release = Release(
                incarnation=ticket.incarnation,
                slot=ticket.hold.slot,
                generation=ticket.hold.generation,
                engine=self.engine,
                rank=self.rank,
                expected=self.expected[rank],
                abandoned=abandoned,
            )
            releases.append(release)
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

    def _tell(self, link: Link, action: Action, pull: Pull) -> None:
        require(not self.running(action.load), f"{action.op} while bytes may land")
        abandoned = action.op is LoadAction.ABANDON
        require(bool(pull.causes) is abandoned, f"{action.op}, but what happened was", pull.causes)
        require(action.rank not in pull.told, "a rank was told twice:", action.rank)
        pull.told.add(action.rank)
        if not link.broken:
            message = self.message(action.rank, [action.load], abandoned=abandoned)
            self.fabric.messages.append(message)

    def _report(self, action: Action, pull: Pull) -> None:
        require(not pull.reported, "reported twice by one rank")
        require(not self.running(action.load), "reported while bytes may land")
        pull.reported = True
        self.renewing.end(action.load)
        self._check_reason(action.error, pull)
        self._check_told(pull)
        if action.error is None:
            self.check_pages(pull)
        if pull.pulling:
            self.results.append((pull.request, action.error))

    def _check_reason(self, error: KVFerryError | None, pull: Pull) -> None:
        first = pull.causes[0] if pull.causes else None
        if isinstance(first, str):
            kind = DeadlineError if first is LATE else StaleError
            require(isinstance(error, kind), f"{first}, but reported", error)
        else:
            require(error is first, "reported", error, "but what happened was", first)

    def _check_told(self, pull: Pull) -> None:
        """Of a failure, every rank; else those who heard nothing with a fence.

        Of a load that shares its hold, nobody.
        """
        everybody = bool(pull.causes) or not pull.pulling
        parties = () if pull.shared else pull.parties
        told = {party.rank for party in parties if everybody or not party.reads}
        require(pull.told == told, "told were", pull.told, "and to be told", told)

    def _check_failing(self) -> None:
        """What failed winds down, and is reported as soon as it is quiet."""
        for load_id, pull in self.pulls.items():
            if not pull.causes or pull.reported:
                continue
            running = self.running(load_id)
            require(bool(running), "failed and quiet, but not reported")
            ending = all(load_id not in t.wanted for t in running)
            require(ending, "failed, but its transfers go on")

    # What the world looks at.

    def running(self, load_id: LoadId) -> list[Transfer]:
        """A load's transfers that are not final, or not heard of."""
        return [t for t in self.transfers if load_id in t.loads]

    def check_pages(self, pull: Pull) -> None:
        """Every page holds what the ticket's request computed."""
        if not pull.pulling:
            return
        for page, _, wanted in pull.wants:
            for party in self.parties:
                got = self.pages[page].get(party.rank)
                require(got == wanted or not party.reads, "stale bytes accepted:", got, wanted)

    def sever(self, *, failing: bool) -> None:
        """The connection to the producer breaks."""
        self.fabric.sever(self._link, failing=failing)

    def crash(self) -> None:
        """The process is gone: nothing of it goes on."""
        for transfer in self.transfers:
            self.fabric.drop(transfer)


def _wants(request: Decode) -> list[tuple[int, int, Content]]:
    prompt, sources = request.issue.prompt, request.issue.ticket.pages[0]
    wants = [
        (page, source, prompt.content(index))
        for index, (page, source) in enumerate(zip(request.pages, sources, strict=False))
    ]
    return wants[request.cached :]
