"""The states of a load and of a hold in ``docs/how-it-works.md`` are those of the code."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvferry.core.errors import TransportError
from kvferry.core.lifecycle.holds import NOTHING, Hold, Incarnation, RequestId
from kvferry.core.lifecycle.leased_holds import LeasedHolds
from kvferry.core.lifecycle.load_machine import LoadAction, LoadId, LoadMachine, RemoteRank
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket
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
DEPTH = 7  # the most events that it takes to reach every state and to leave it again


def explored(
    make: Callable[[], Any],
    events: Mapping[str, Callable[[Any], object]],
    possible: Mapping[str, Collection[str]] | None = None,
) -> Iterator[tuple[str, str, str, Any]]:
    """Yield old state, event, new state and the thing, for each event in each state that it has.

    ``possible`` are the events of each state; all if it is not given.
    """
    paths: list[tuple[str, ...]] = [()]
    seen = {make().state()}
    while paths:
        path = paths.pop()
        for event in events:
            thing = make()
            for earlier in path:
                events[earlier](thing)
                thing.state()
            before = thing.state()
            if possible is not None and event not in possible[before]:
                continue
            events[event](thing)
            after = thing.state()
            yield before, event, after, thing
            if after not in seen and len(path) < DEPTH:
                seen.add(after)
                paths.append((*path, event))


# The states of a load.

STAGES = {
    Stage.HANDSHAKE: "handshake",
    Stage.CHECK: "check",
    Stage.TRANSFER: "read",
    Stage.FENCE: "fence",
}


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


LOAD_EVENTS: dict[str, Callable[[NamedLoad], object]] = {
    "shaken": lambda it: it.load.handshake_succeeded((RemoteRank(rank=0, reads=True),)),
    "not shaken": lambda it: it.load.handshake_failed(ERROR),
    "ready": lambda it: it.load.checked(0, HOLD_OF_REQUEST.ready),
    "computing": lambda it: it.load.checked(0, HOLD_OF_REQUEST.computing),
    "gone": lambda it: it.load.checked(0, NOTHING),
    "read": lambda it: it.load.pages_read(0),
    "fenced": lambda it: it.load.fenced(0, HOLD_OF_REQUEST.ready),
    "stale": lambda it: it.load.fenced(0, NOTHING),
    "lost": lambda it: it.load.lost(0, ERROR),
    "failing": lambda it: it.load.failing(0, ERROR),
    "abort": lambda it: it.load.abort(ERROR),
    "tick": lambda it: it.load.tick(0.0),
    "late": lambda it: it.load.tick(DEADLINE),
}


def test_steps_of_a_load_are_on_the_page() -> None:
    taken = {
        (before, after)
        for computed in (True, False)
        for before, _, after, _ in explored(partial(NamedLoad, computed=computed), LOAD_EVENTS)
        if before != after
    }
    # With one rank, a failed load may be quiet at once and so skip the state "winding down".
    at_once = {(before, "winding down") for before, after in taken if after == "failed"}
    inside = {"check", "wait", "read", "fence"}
    straight = {(before, after) for before, after in taken if after != "failed"}
    passed = {step for step in at_once if step[0] in inside}
    ended = {(before, after) for before, after in taken - straight if before not in inside}
    assert straight | passed | ended == LOAD


# The states of a hold.


LIFE = Incarnation(1)
NAMES: dict[str, Any] = {
    "incarnation": LIFE,
    "slot": HOLD_OF_REQUEST.slot,
    "generation": HOLD_OF_REQUEST.generation,
}
DONE = Release(**NAMES, engine="decode", rank=0, expected=1)
"""From the only rank of a decode engine."""
RENEWAL = Renewal(**NAMES, engine="decode", life=1)


class NamedHold:
    """A hold on one rank, with its state as the page names it."""

    def __init__(self) -> None:
        self.words = [NOTHING]
        self.holds = LeasedHolds(self.words, LIFE, [0] * len(self.words))
        self.now = 0.0

    def state(self) -> str:
        if self.words[0] == NOTHING:
            assert HOLD_OF_REQUEST not in self.holds
            return "free"
        if self.words[0] == HOLD_OF_REQUEST.ready:
            return "ready"
        return "ticketed" if self.holds.has_tickets else "computing"


HOLD_EVENTS: dict[str, Callable[[NamedHold], object]] = {
    "take on": lambda k: k.holds.apply(HoldOrders(take_ons=((REQUEST, HOLD_OF_REQUEST),)), k.now),
    "drop": lambda k: k.holds.apply(HoldOrders(drops=(HOLD_OF_REQUEST,)), k.now),
    "ticket": lambda k: k.holds.apply(HoldOrders(tickets=(TICKET,)), k.now),
    "passed": lambda k: k.holds.ready(HOLD_OF_REQUEST, k.now),
    "renew": lambda k: k.holds.renew(RENEWAL, k.now),
    "expire": lambda k: k.holds.expire(k.now + 1000.0),
    "done": lambda k: k.holds.release(DONE),
    "abandon": lambda k: k.holds.release(replace(DONE, abandoned=True)),
    "give up": lambda k: k.holds.apply(HoldOrders(ends=(HOLD_OF_REQUEST,)), k.now),
}
POSSIBLE_EVENTS = {
    "free": {"take on"},
    "computing": {"drop", "ticket", "passed", "renew", "expire", "done", "abandon"},
    "ticketed": {"passed", "renew", "expire", "done", "abandon", "give up"},
    "ready": {"passed", "renew", "expire", "done", "abandon", "give up"},
}
"""The events that are possible in each state."""


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
    for before, event, after, hold in explored(NamedHold, HOLD_EVENTS, POSSIBLE_EVENTS):
        if before != after:
            causes[before, after].add(event)
        if sent := hold.holds.take_sent():
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
