"""The states of a load and of a hold in ``docs/how-it-works.md`` are those of the code."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.core.errors import TransportError
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.load_machine import LoadAction, LoadId, LoadMachine, RemoteRank
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.messages import Release, Renewal
from kvferry.core.metrics import Stage

PAGE = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()


def table(third: str) -> list[list[str]]:
    """Return the rows of the table of states whose third column has this head."""
    found = re.search(rf"^\| state \| next \| {third} .*\n\|-.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert found is not None
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in found[1].splitlines()]


LOAD = {(before, after) for before, after, _ in table("when")}
"""The steps of a load that reads from one producer rank, by (state, next state)."""

HOLD: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
"""By (state, next state) of a hold: when its request is reported as sent, for each event."""
for before, after, events, reported in table("by"):
    for event in events.partition(":")[0].split(", "):
        HOLD[before, after][event] = reported

REQUEST, HOLD_OF_REQUEST = RequestId("a"), Hold(slot=0, generation=7)
TICKET = NewTicket(request=REQUEST, hold=HOLD_OF_REQUEST, lease=30.0)
DEADLINE, ERROR = 100.0, TransportError("it failed")
DEPTH = 7
"""The most events that it takes to reach every state and to leave it again."""


# The states of a load.

STAGES = {
    Stage.HANDSHAKE: "handshake",
    Stage.CHECK: "check",
    Stage.TRANSFER: "read",
    Stage.FENCE: "fence",
}
"""The name of each stage on the page."""


class NamedLoad:
    """A load that reads from one rank, with its state as the page names it."""

    def __init__(self, *, computed: bool) -> None:
        self.load = LoadMachine(
            id=LoadId(1),
            actions=[],
            hold=HOLD_OF_REQUEST,
            computed=computed,
            reads=True,
            deadline=DEADLINE,
        )
        self.outcome = ""

    def state(self) -> str:
        for action in self.load.actions:
            if action.op is LoadAction.REPORT:
                self.outcome = "failed" if action.error else "received"
        if self.outcome:
            return self.outcome
        stage = self.load.stage
        if stage is None or not self.load.is_wanted:
            return "winding down"
        return "wait" if self.load.awaits_pages else STAGES[stage]


LOAD_EVENTS: tuple[Callable[[LoadMachine], None], ...] = (
    lambda load: load.handshake_succeeded((RemoteRank(rank=0, reads=True),)),
    lambda load: load.handshake_failed(ERROR),
    lambda load: load.checked(0, HOLD_OF_REQUEST.ready),
    lambda load: load.checked(0, HOLD_OF_REQUEST.computing),
    lambda load: load.checked(0, NOTHING),
    lambda load: load.pages_read(0),
    lambda load: load.fenced(0, HOLD_OF_REQUEST.ready),
    lambda load: load.fenced(0, NOTHING),
    lambda load: load.lost(0, ERROR),
    lambda load: load.failing(0, ERROR),
    lambda load: load.abort(ERROR),
    lambda load: load.tick(0.0),
    lambda load: load.tick(DEADLINE),
)


def load_steps(computed: bool) -> Iterator[tuple[str, str]]:
    """Yield every step that a load takes from one state to another."""
    paths: list[tuple[int, ...]] = [()]
    seen = {"handshake"}
    while paths:
        path = paths.pop()
        for number in range(len(LOAD_EVENTS)):
            load = NamedLoad(computed=computed)
            for event in path:
                LOAD_EVENTS[event](load.load)
                load.state()
            before = load.state()
            LOAD_EVENTS[number](load.load)
            after = load.state()
            if before != after:
                yield before, after
            if after not in seen and len(path) < DEPTH:
                seen.add(after)
                paths.append((*path, number))


def test_steps_of_a_load_are_on_the_page() -> None:
    taken = {*load_steps(computed=True), *load_steps(computed=False)}
    # With one rank, a failed load may be quiet at once and so skip the state "winding down".
    at_once = {(before, "winding down") for before, after in taken if after == "failed"}
    inside = {"check", "wait", "read", "fence"}
    straight = {(before, after) for before, after in taken if after != "failed"}
    passed = {step for step in at_once if step[0] in inside}
    ended = {(before, after) for before, after in taken - straight if before not in inside}
    assert straight | passed | ended == LOAD


# The states of a hold.


class NamedHold:
    """A hold on one rank, with its state as the page names it."""

    def __init__(self) -> None:
        self.words = [NOTHING]
        self.incarnation = random_incarnation()
        self.holds = WorkerHolds(self.words, self.incarnation, [0] * len(self.words))
        self.now = 0.0

    def state(self) -> str:
        if self.words[0] == NOTHING:
            assert HOLD_OF_REQUEST not in self.holds
            return "free"
        if self.words[0] == HOLD_OF_REQUEST.ready:
            return "ready"
        return "ticketed" if self.holds.has_tickets else "computing"

    def release(self, *, abandoned: bool) -> None:
        """Receive "done" or "abandon" from the only rank of a decode engine."""
        message = Release(
            incarnation=self.incarnation,
            slot=HOLD_OF_REQUEST.slot,
            generation=HOLD_OF_REQUEST.generation,
            engine="decode",
            rank=0,
            expected=1,
            abandoned=abandoned,
        )
        self.holds.release(message)

    def renew(self) -> None:
        """Receive a renewal from a decode rank."""
        message = Renewal(
            incarnation=self.incarnation,
            slot=HOLD_OF_REQUEST.slot,
            generation=HOLD_OF_REQUEST.generation,
            engine="decode",
            life=1,
        )
        self.holds.renew(message, self.now)

    def expire(self) -> None:
        """Let the lease end."""
        self.now += 1000.0
        self.holds.expire(self.now)


HOLD_EVENTS: dict[str, Callable[[NamedHold], object]] = {
    "take on": lambda k: k.holds.apply(HoldOrders(take_ons=((REQUEST, HOLD_OF_REQUEST),)), k.now),
    "drop": lambda k: k.holds.apply(HoldOrders(drops=(HOLD_OF_REQUEST,)), k.now),
    "ticket": lambda k: k.holds.apply(HoldOrders(tickets=(TICKET,)), k.now),
    "passed": lambda k: k.holds.ready(HOLD_OF_REQUEST, k.now),
    "renew": lambda k: k.renew(),
    "expire": lambda k: k.expire(),
    "done": lambda k: k.release(abandoned=False),
    "abandon": lambda k: k.release(abandoned=True),
    "give up": lambda k: k.holds.apply(HoldOrders(ends=(HOLD_OF_REQUEST,)), k.now),
}
POSSIBLE_EVENTS = {
    "free": {"take on"},
    "computing": {"drop", "ticket", "passed", "renew", "expire", "done", "abandon"},
    "ticketed": {"passed", "renew", "expire", "done", "abandon", "give up"},
    "ready": {"passed", "renew", "expire", "done", "abandon", "give up"},
}
"""The events that are possible in each state."""


def hold_steps() -> Iterator[tuple[str, str, str, list[RequestId]]]:
    """Yield every step of a hold: old state, event, new state, and requests reported as sent."""
    paths: list[tuple[str, ...]] = [()]
    seen = {"free"}
    while paths:
        path = paths.pop()
        before = ""
        for event in sorted(HOLD_EVENTS):
            hold = NamedHold()
            for earlier in path:
                HOLD_EVENTS[earlier](hold)
            before = hold.state()
            if event not in POSSIBLE_EVENTS[before]:
                continue
            HOLD_EVENTS[event](hold)
            after = hold.state()
            yield before, event, after, hold.holds.take_sent()
            if after not in seen:
                seen.add(after)
                paths.append((*path, event))


def test_a_hold_that_ends_while_computing_is_reported_with_the_order() -> None:
    with_order = [event for event, when in HOLD["computing", "free"].items() if when != "never"]
    assert with_order == ["done", "abandon"]
    for event in with_order:
        hold = NamedHold()
        for each in ("take on", event):
            HOLD_EVENTS[each](hold)
        assert not hold.holds.take_sent()
        HOLD_EVENTS["ticket"](hold)
        assert hold.holds.take_sent() == [REQUEST]


def test_steps_of_a_hold_are_on_the_page() -> None:
    causes: dict[tuple[str, str], set[str]] = defaultdict(set)
    reported = set()
    for before, event, after, sent in hold_steps():
        if before != after:
            causes[before, after].add(event)
        if sent:
            assert sent == [REQUEST]
            reported.add((before, event))
    causes["ready", "ready"] = {"renew"}  # it restarts the lease
    assert causes == {step: set(events) for step, events in HOLD.items()}
    assert reported == {
        (before, event)
        for (before, _), events in HOLD.items()
        for event, when in events.items()
        if when == "at once"
    }
