"""The consumer's requests, in any sequence of what vLLM, its workers and prefill may do.

No request is lost, none is ended twice, and no host page is given to another load before the one
that has it is reported. At the end nothing is kept, and somebody has said "done" for every hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvferry.core.endpoint import Load
from kvferry.core.errors import PeerLostError
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.host_pages import HostPages
from kvferry.core.metrics import Metrics
from kvferry.core.side_channel_messages import RoomNews
from kvferry.integrations.vllm.ticket_params import read_part, read_ticket
from tests.integrations.vllm.halves import Follower, Users, blocks, consumer, request, step, ticket
from tests.integrations.vllm.test_early_half import DECODE, computed, finished

TICKETS = {"a": ticket(), "b": ticket()}
KINDS = (*TICKETS, "other prompt", "sample", "room", "same room", "another room")


def said_by_prefill() -> tuple[RoomNews, RoomNews]:
    """What prefill publishes of a prompt of 100 tokens: after 40 of them, and at its end."""
    prefill = computed(40)
    part = prefill.news()
    return part, finished(prefill).news()


NEWS = {"room": said_by_prefill(), "another room": said_by_prefill()}
HOLDS = {room: read_part(last.part, is_last=True).ticket.hold for room, (_, last) in NEWS.items()}


@dataclass(slots=True, kw_only=True)
class Known:
    """A request, as vLLM knows it."""

    request: Any
    room: str = ""
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
    is_complete: bool = field(default=True)  # it has the whole ticket


class Engine(RuleBasedStateMachine):
    """vLLM's scheduler, the workers, and prefill."""

    @initialize(staged=st.booleans(), total=st.sampled_from([27, 64]))
    def start(self, staged: bool, total: int) -> None:
        self.now = 0.0
        self.follower, self.directory = Follower(), Users()
        self.metrics = Metrics(driver="loopback")
        fakes: dict[str, Any] = {"follower": self.follower, "directory": self.directory}
        self.consumer = consumer(blocks=total, metrics=self.metrics, is_staged=staged, **fakes)
        self.is_staged = staged
        self.host = HostPages(range(1, 10), patience=10.0, clock=lambda: self.now)
        if staged:
            self.consumer.set_host_pages(self.host)
        self.known: dict[str, Known] = {}
        self.numbers = iter(range(1 << 20))
        self.queued: set[str] = set()  # requests of which the workers are to be told
        self.aborted: set[str] = set()
        self.running: dict[str, Running] = {}
        self.used: set[Hold] = set()
        self.prepared: set[Hold] = set()
        self.done: set[Hold] = set()
        self.reported = {"loads": 0, "failed_loads": 0}

    def pick(self, data: st.DataObject, *statuses: str) -> Known | None:
        """Some request that has not ended, in one of these states."""
        found = [each for each in self.known.values() if each.status in statuses]
        found = [each for each in found if not each.is_ended]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(kind=st.sampled_from(KINDS))
    def arrive(self, kind: str) -> None:
        name = f"{next(self.numbers)}_s" if kind == "sample" else f"r{next(self.numbers)}"
        if "room" in kind:
            room = kind.removeprefix("same ")
            made = request(100, DECODE | {"transfer_id": room}, name=name)
            self.known[name] = Known(request=made, room=room)
        else:
            made = request(40, TICKETS.get(kind, TICKETS["a"]), name=name)
            made.prompt_token_ids = [7] * 40 if kind == "other prompt" else list(range(40))
            self.known[name] = Known(request=made, has_news=True, has_ticket=True)
            if kind != "other prompt":
                self.used.add(read_ticket(made.kv_transfer_params).hold)
        self.consumer.on_new_request(made)

    @rule(data=st.data(), what=st.sampled_from(["part", "ticket", "error"]))
    def hear(self, data: st.DataObject, what: str) -> None:
        names = [n for n in self.follower.followed if not self.known[n].has_ticket]
        if names:
            self.say(data.draw(st.sampled_from(names)), what)

    def say(self, name: str, what: str) -> None:
        each = self.known[name]
        part, ticket = NEWS[each.room]
        each.has_ticket = what != "part"
        error = PeerLostError("engine prefill: it has no ticket")
        news: dict[str, Any] = {"part": part, "ticket": ticket, "error": error}
        self.follower.hear(news[what], name)
        if what == "ticket":
            self.used.add(HOLDS[each.room])
        each.has_news = True

    @rule(data=st.data(), cached=st.sampled_from([0, 16, 96, 100]), allocates=st.booleans())
    def schedule(self, data: st.DataObject, cached: int, allocates: bool) -> None:
        each = self.pick(data, "waits")
        if each is None:
            return
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

    @rule()
    def run_step(self) -> None:
        messages = self.consumer.drain()
        self.prepared.update(ticket.hold for ticket in messages.prepare)
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
                self.done.add(part.ticket.hold)
        for name in messages.aborted:
            self.aborted.discard(name)
            if name not in self.running:
                continue  # it was reported meanwhile
            running = self.running[name]
            running.is_aborted = True
            if running.load is not None and running.load.is_early:
                self.done.add(running.load.ticket.hold)
        assert not self.aborted
        pages = [page for load in self.reading() if load.copy for page in load.copy.pages]
        assert len(set(pages)) == len(pages)

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
        elif not load.shared:
            assert not any(each.ticket.hold == hold for each in self.reading())
        if not (load.shared or load.is_early):
            self.done.add(hold)
        if not load.is_early:
            assert hold in self.prepared

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans())
    def report(self, data: st.DataObject, fails: bool) -> None:
        self.end_load(data.draw(st.sampled_from(sorted(self.running))), fails)

    def end_load(self, name: str, fails: bool) -> None:
        running, each = self.running.pop(name), self.known[name]
        if running.load is None or running.is_aborted or not running.is_complete:
            fails = True
        self.consumer.loads_finished([name], {name} if fails else ())
        if running.load is not None:
            self.reported["failed_loads" if fails else "loads"] += 1
        if not each.is_ended:
            each.status = "waits" if fails else "computed"

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if (each := self.pick(data, "waits", "loads", "computed")) is not None:
            self.finish(each)

    def finish(self, each: Known) -> None:
        each.is_ended = True
        self.consumer.request_finished(each.request)
        if each.status == "loads":
            self.aborted.add(each.request.request_id)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        if (each := self.pick(data, "computed")) is not None:
            each.status = "waits"

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        each = self.pick(data, "computed")
        names = [each.request.request_id] if each else []
        assert not self.consumer.loaded_request_waits(step(**dict.fromkeys(names, 1), another=1))

    def teardown(self) -> None:
        """Everything comes to its end, in whatever state it is."""
        if not hasattr(self, "known"):
            return
        for each in self.known.values():
            if not each.is_ended:
                self.finish(each)
        self.run_step()
        for name in [name for name in self.follower.followed if not self.known[name].has_ticket]:
            assert self.consumer.follows
            assert self.consumer.pending, "the engine has to run steps until the ticket comes"
            self.say(name, "ticket")
        self.run_step()
        for name in list(self.running):
            self.end_load(name, fails=True)
        self.run_step()
        assert not self.consumer.pending
        assert not self.consumer.follows
        assert not self.follower.followed
        assert not self.directory.names
        assert self.host.used == self.host.waiting == 0
        assert not self.consumer.loaded_request_waits(step())
        assert self.used <= self.done
        counted = self.metrics.take() or {}
        for name, count in self.reported.items():
            assert counted.get(name, {}).get("loopback", 0) >= count


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=150, stateful_step_count=40
)


def test_parts_are_of_one_hold() -> None:
    """Otherwise the rooms above would not be those of a real prefill."""
    for part, last in NEWS.values():
        before, after = (read_part(each.part, is_last=each.is_last) for each in (part, last))
        assert before.ticket.hold == after.ticket.hold
        assert (before.is_last, after.is_last) == (False, True)
