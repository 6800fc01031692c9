"""The consumer's requests, in any sequence of what vLLM, its workers and prefill may do.

No request is lost, none is ended twice, and no host page is given to another load before the one
that has it is reported. At the end nothing is kept, and somebody has said "done" for every hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.endpoint import Load
from kvferry.core.errors import PeerLostError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.host_pages import HostPages
from kvferry.core.metrics import Metrics
from kvferry.core.side_channel_messages import RoomNews
from kvferry.integrations.vllm.ticket_format import read_part, read_ticket
from tests.integrations.vllm.halves import Follower, Users, blocks, consumer, request, step, ticket
from tests.integrations.vllm.test_early_half import DECODE, Prefilling

TICKETS = [ticket() for _ in range(12)]
"""The first one is for several requests."""


def said_by_prefill() -> tuple[RoomNews, RoomNews]:
    """What prefill publishes of a prompt of 100 tokens: after 40 of them, and at its end."""
    prefill = Prefilling(40)
    part = prefill.news()
    return part, prefill.finish().news()


ROOMS = [said_by_prefill() for _ in range(6)]
"""The first one is of several requests, and one may come with its ticket."""
HOLDS = [read_part(last.part, is_last=True).ticket.hold for _, last in ROOMS]
KINDS = (
    *("ticket", "shared ticket", "sample", "other prompt"),
    *("room", "shared room", "ticket of shared room"),
)


@dataclass(slots=True, kw_only=True)
class Known:
    """A request, as vLLM knows it."""

    request: Any
    room: int = -1
    status: str = "waits"  # or "loads", or "computed"
    is_over: bool = False  # it loads nothing any more
    is_ended: bool = False
    has_news: bool = False  # prefill has said something
    has_ticket: bool = False  # prefill has said everything


@dataclass(slots=True, kw_only=True)
class Running:
    """What the workers have been told of a request."""

    load: Load | None  # None if its ticket was refused
    is_aborted: bool = False
    is_complete: bool = True  # it has the whole ticket


class Engine:
    """vLLM's scheduler, the workers, and prefill; of each event, a number says the details."""

    def __init__(self, staged: bool, total: int, kinds: list[str]) -> None:
        self.now, self.kinds = 0.0, kinds
        self.follower, self.directory = Follower(), Users()
        self.metrics = Metrics(driver="loopback")
        fakes: dict[str, Any] = {"follower": self.follower, "directory": self.directory}
        self.consumer = consumer(blocks=total, metrics=self.metrics, is_staged=staged, **fakes)
        self.is_staged = staged
        self.host = HostPages(range(1, 10), patience=10.0, clock=lambda: self.now)
        if staged:
            self.consumer.pages.host = self.host
        self.known: dict[str, Known] = {}
        self.numbers = iter(range(1 << 20))
        self.queued: set[str] = set()  # requests of which the workers are to be told
        self.aborted: set[str] = set()
        self.running: dict[str, Running] = {}
        self.used: set[Hold] = set()
        self.prepared: list[Hold] = []
        self.done: set[Hold] = set()
        self.loaded = 0

    def alive(self, *statuses: str) -> list[str]:
        """The requests that have not ended, and are in one of these states."""
        known = self.known.items()
        return [name for name, one in known if not one.is_ended and one.status in statuses]

    def unheard(self) -> list[str]:
        """The requests of which prefill has yet to say something."""
        return [name for name in self.follower.followed if not self.known[name].has_ticket]

    def arrive(self, number: int) -> None:
        kind = self.kinds[number % len(self.kinds)]
        if len(self.alive("waits", "loads", "computed")) == 4:
            return
        number = next(self.numbers)
        name = f"{number}_s" if kind == "sample" else f"r{number}"
        if "ticket" not in kind and "room" in kind:
            room = 0 if kind == "shared room" else 1 + number % (len(ROOMS) - 1)
            made = request(100, DECODE | {"transfer_id": f"room {room}"}, name=name)
            self.known[name] = Known(request=made, room=room)
        elif "room" in kind:
            made = request(100, msgspec.json.decode(ROOMS[0][1].part), name=name)
        else:
            own = kind == "ticket"
            params = TICKETS[1 + number % (len(TICKETS) - 1) if own else 0]
            made = request(40, params, name=name)
            made.prompt_token_ids = [7] * 40 if kind == "other prompt" else list(range(40))
        if name not in self.known:
            self.known[name] = Known(request=made, has_news=True, has_ticket=True)
            if kind != "other prompt":
                self.used.add(read_ticket(made.kv_transfer_params).hold)
        self.consumer.on_new_request(made)

    def hear(self, number: int) -> None:
        if names := self.unheard():
            self.say(
                names[number % len(names)], ("part", "part", "ticket", "error")[number // 8 % 4]
            )

    def say(self, name: str, what: str) -> None:
        each = self.known[name]
        part, ticket = ROOMS[each.room]
        each.has_ticket = what != "part"
        error = PeerLostError("engine prefill: it has no ticket")
        news: dict[str, Any] = {"part": part, "ticket": ticket, "error": error}
        self.follower.hear(news[what], name)
        if what == "ticket":
            self.used.add(HOLDS[each.room])
        elif what == "error" and each.status == "loads" and not each.is_ended:
            self.aborted.add(name)
        each.has_news = True

    def schedule(self, number: int) -> None:
        names = self.alive("waits")
        if not names:
            return
        each, allocates = self.known[names[number % len(names)]], number // 4 % 3 > 0
        cached = (0, 0, 16, 96, 100)[number // 16 % 5]
        most = each.request.num_prompt_tokens
        cached = min(cached, most)
        tokens = self.consumer.num_matched_tokens(each.request, cached)
        assert tokens == self.consumer.num_matched_tokens(each.request, cached)
        assert tokens in self.expected(each, cached)
        if tokens is None or not allocates:
            return
        ids = blocks(*range(1, 1 + -(-most // 16)), cached=cached // 16)
        self.consumer.blocks_allocated(each.request, ids, tokens)
        each.status = "loads" if tokens else "computed"
        each.is_over = True
        if tokens:
            self.queued.add(each.request.request_id)

    def expected(self, each: Known, cached: int) -> list[int | None]:
        """How many tokens are to be loaded, or that the request has to wait."""
        most = each.request.num_prompt_tokens
        if each.is_over:
            return [0]
        if not each.has_news:
            return [None]
        waits = self.is_staged or not each.has_ticket  # for host pages, or for the ticket
        return [most - cached, *([None] if waits else [])]

    def run_step(self, number: int = 0) -> None:
        messages = self.consumer.drain()
        self.prepared += [ticket.hold for ticket in messages.prepare]
        for load in messages.loads:
            self.take(load)
        for name, _ in messages.refused:
            self.queued.remove(name)
            self.running[name] = Running(load=None)
        assert not self.queued
        for name, part in messages.parts.items():
            running = self.running[name]
            assert running.load is not None
            assert running.load.is_early
            if part.is_last:
                running.is_complete = True
        for name in messages.aborted:
            self.aborted.discard(name)
            if name not in self.running:
                continue  # it was reported meanwhile
            self.running[name].is_aborted = True
        assert not self.aborted
        pages = [page for load in self.reading() if load.copy for page in load.copy.pages]
        assert len(set(pages)) == len(pages)

    def check_host_pages(self) -> None:
        """Bytes may land in them until the load is reported."""
        copies = [load.copy for load in self.reading() if load.copy is not None]
        assert sum(len(copy.pages) for copy in copies) <= self.host.used

    def reading(self) -> list[Load]:
        """The loads that are not reported yet."""
        return [each.load for each in self.running.values() if each.load is not None]

    def take(self, load: Load) -> None:
        """Begin a load, or say "done"."""
        hold = load.ticket.hold
        if load.report:
            self.queued.remove(load.request)
            assert load.request not in self.running
            self.running[load.request] = Running(load=load, is_complete=not load.is_early)
            assert load.reads
        if not (load.shared or load.is_early):
            others = [each for each in self.running.values() if each.load and each.is_complete]
            held = [each.load.ticket.hold for each in others if each.load not in (None, load)]
            assert hold not in held, "who says done ends it for all"
        if not (load.shared or load.is_early):
            self.done.add(hold)
        if not load.is_early and load.request in self.known:
            self.prepared.remove(hold)  # each is followed by one load

    def report(self, number: int) -> None:
        if names := list(self.running):
            self.end_load(names[number % len(names)], fails=number // 8 % 2 > 0)

    def end_load(self, name: str, fails: bool) -> None:
        running, each = self.running.pop(name), self.known[name]
        self.aborted.discard(name)
        if running.load is None or running.is_aborted or not running.is_complete:
            fails = True
        self.consumer.loads_finished([name], {name} if fails else ())
        if running.load is not None:
            if running.load.is_early:  # it says "abandon" itself, at least
                self.done.add(running.load.ticket.hold)
            self.loaded += not fails
        if not each.is_ended:
            each.status = "waits" if fails else "computed"

    def end(self, number: int) -> None:
        if names := self.alive("waits", "loads", "computed"):
            self.finish(self.known[names[number % len(names)]])

    def finish(self, each: Known) -> None:
        each.is_ended = True
        self.consumer.request_finished(each.request)
        if each.status == "loads":
            self.aborted.add(each.request.request_id)

    def preempt(self, number: int) -> None:
        if names := self.alive("computed"):
            self.known[names[number % len(names)]].status = "waits"

    def let_time_pass(self, number: int) -> None:
        self.now += number % 16

    def compute(self, number: int) -> None:
        names = self.alive("computed")
        assert not self.consumer.loaded_request_waits(step(**dict.fromkeys(names, 1), another=1))

    def close(self) -> None:
        """Everything comes to its end, in whatever state it is."""
        for each in self.known.values():
            if not each.is_ended:
                self.finish(each)
        self.run_step()
        for name in self.unheard():
            assert self.consumer.follows
            assert self.consumer.pending, "the engine has to run steps until the ticket comes"
            self.say(name, "ticket")
        self.run_step()
        for name in list(self.running):
            self.end_load(name, fails=True)
        self.run_step()
        assert not self.consumer.pending
        assert not self.consumer.follows
        assert not self.consumer._pulls
        assert not self.follower.followed
        assert not self.directory.names
        assert self.host.used == self.host.waiting == 0
        assert not self.consumer.loaded_request_waits(step())
        assert self.used <= self.done
        assert not self.prepared
        counted = self.metrics.take() or {}
        assert counted.get("loads", {}).get("loopback", 0) == self.loaded


EVENTS = (
    *("arrive", "hear", "schedule", "run_step") * 3,
    *("report", "end") * 2,
    *("preempt", "let_time_pass", "compute"),
)


@settings(max_examples=500)
@given(
    staged=st.booleans(),
    total=st.sampled_from([27, 64]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 255)), min_size=30),
)
def test_whatever_happens(
    staged: bool, total: int, kinds: list[str], events: list[tuple[str, int]]
) -> None:
    engine = Engine(staged, total, kinds)
    for event, number in events:
        getattr(engine, event)(number)
        engine.check_host_pages()
    engine.close()
