"""The pictures of the documentation match the code, and are up to date."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

import numpy as np
import pytest

from docs.tools.pictures import (
    COPIES,
    DONE_EXPECTED,
    EXAMPLE,
    FOLDER,
    HOLD,
    HOLD_REPORTED,
    LOAD,
    PICTURES,
    READS,
)
from kvferry.core.errors import TransportError
from kvferry.core.layout import Layout
from kvferry.core.lifecycle.holds import NOTHING, Hold, RequestId, random_incarnation
from kvferry.core.lifecycle.loads import LoadAction, LoadId, LoadMachine, RemoteRank
from kvferry.core.lifecycle.scheduler_holds import HoldOrders
from kvferry.core.lifecycle.worker_holds import WorkerHolds
from kvferry.core.messages import Release, Renewal
from kvferry.core.metrics import Stage
from kvferry.core.planner.build_copies import Pages, ReadRequest, build_copies, unwritten_spans
from kvferry.core.planner.plan import make_plan
from tests.core.layouts import DIM, heads, layout, paged

REQUEST, HOLD_OF_REQUEST = RequestId("a"), Hold(slot=0, generation=7)
DEADLINE, ERROR = 100.0, TransportError("it failed")
DEPTH = 7
"""The most events that it takes to reach every state and to leave it again."""


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_up_to_date(name: str) -> None:
    drawn = PICTURES[name]()
    assert (FOLDER / name).read_text() == drawn, "run: python -m docs.tools.pictures"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_no_picture_is_left_over() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PICTURES)


# The states of a load.

STAGES = {
    Stage.HANDSHAKE: "handshake",
    Stage.CHECK: "check",
    Stage.TRANSFER: "read",
    Stage.FENCE: "fence",
}
"""The name of each stage in the picture."""


class PicturedLoad:
    """A load that reads from one rank, with its state as the picture names it."""

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
        """Return the state."""
        for action in self.load.actions:
            if action.op is LoadAction.REPORT:
                self.outcome = "failed" if action.error else "received"
        if self.outcome:
            return self.outcome
        stage = self.load.stage
        if stage is None or not self.load.is_wanted:
            return "winding down"
        return "wait" if self.load.is_computing else STAGES[stage]


LOAD_EVENTS: tuple[Callable[[LoadMachine], None], ...] = (
    lambda load: load.handshake_succeeded((RemoteRank(rank=0, reads=True),)),
    lambda load: load.handshake_failed(ERROR),
    lambda load: load.checked(0, HOLD_OF_REQUEST.ready),
    lambda load: load.checked(0, HOLD_OF_REQUEST.computing),
    lambda load: load.checked(0, NOTHING),
    lambda load: load.read(0),
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
            load = PicturedLoad(computed=computed)
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


def test_load_transitions_match_the_picture() -> None:
    taken = {*load_steps(computed=True), *load_steps(computed=False)}
    # With one rank, a failed load may be quiet at once and so skip the state "winding down".
    at_once = {(before, "winding down") for before, after in taken if after == "failed"}
    inside = {"check", "wait", "read", "fence"}
    straight = {(before, after) for before, after in taken if after != "failed"}
    passed = {step for step in at_once if step[0] in inside}
    ended = {(before, after) for before, after in taken - straight if before not in inside}
    assert straight | passed | ended == set(LOAD)


# The states of a hold.


class PicturedHold:
    """A hold on one rank, with its state as the picture names it."""

    def __init__(self) -> None:
        self.words = [NOTHING]
        self.incarnation = random_incarnation()
        self.holds = WorkerHolds(self.words, self.incarnation, [0] * len(self.words))
        self.now = 0.0

    def state(self) -> str:
        """Return the state."""
        if self.words[0] == NOTHING:
            assert HOLD_OF_REQUEST not in self.holds
            return "free"
        if self.words[0] == HOLD_OF_REQUEST.ready:
            return "ready"
        return "ticketed" if self.holds.ticketed else "computing"

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
        )
        self.holds.renew(message, self.now)

    def expire(self) -> None:
        """Let the lease end."""
        self.now += 1000.0
        self.holds.expire(self.now)


HOLD_EVENTS: dict[str, Callable[[PicturedHold], object]] = {
    "take on": lambda k: k.holds.apply(HoldOrders(take_ons=((REQUEST, HOLD_OF_REQUEST),)), k.now),
    "drop": lambda k: k.holds.apply(HoldOrders(drops=(HOLD_OF_REQUEST,)), k.now),
    "ticket": lambda k: k.holds.apply(HoldOrders(ready=((HOLD_OF_REQUEST, 30.0),)), k.now),
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
            hold = PicturedHold()
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
    for event in HOLD_REPORTED.intersection(HOLD["computing", "free"]):
        hold = PicturedHold()
        for each in ("take on", event):
            HOLD_EVENTS[each](hold)
        assert not hold.holds.take_sent()
        HOLD_EVENTS["ticket"](hold)
        assert hold.holds.take_sent() == [REQUEST]


def test_hold_transitions_match_the_picture() -> None:
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
        for (before, after), events in HOLD.items()
        if after == "free" and before != "computing"
        for event in HOLD_REPORTED.intersection(events)
    }


# The planner.


def engine(shards: tuple[tuple[int, int], ...], block: int, order: str = "NHD") -> list[Layout]:
    """Return the layouts of an engine with one rank for each range of heads."""
    return [
        layout(heads(shard=shard, block=block, order=order), groups=[paged(block)])
        for shard in shards
    ]


def prefill(order: str = "HND") -> list[Layout]:
    return engine(EXAMPLE.prefill, EXAMPLE.prefill_block, order)


def decode(order: str = "NHD") -> list[Layout]:
    return engine(EXAMPLE.decode, EXAMPLE.decode_block, order)


def read_request(tokens: tuple[int, int]) -> ReadRequest:
    local, remote = (
        Pages(ids=np.array(ids, dtype=np.int64))
        for ids in (EXAMPLE.decode_pages, EXAMPLE.prefill_pages)
    )
    return ReadRequest(ranges=(tokens,), local=(local,), remote=(remote,))


def test_reads_match_the_picture() -> None:
    plans = [make_plan(decode(), prefill(), rank) for rank in range(len(EXAMPLE.decode))]
    found = {
        (reader, source.remote): source.matches[0].overlaps[0].shard
        for reader, one in enumerate(plans)
        for source in one.sources
    }
    assert found == READS
    assert {one.readers for one in plans} == {DONE_EXPECTED}
    assert sum(last - first for first, last in READS.values()) == EXAMPLE.heads


def test_sub_blocks_match_the_picture() -> None:
    [pairing] = [match.pairing for match in make_plan(decode(), prefill(), 0).sources[0].matches]
    assert pairing.granularity == EXAMPLE.sub_block
    assert pairing.round_outwards(0, EXAMPLE.tokens) == (0, EXAMPLE.read)


def test_zeroed_span_matches_the_picture() -> None:
    ours = decode()
    left = unwritten_spans(
        ours[0], make_plan(ours, prefill(), 0), read_request((0, EXAMPLE.tokens))
    )
    _, last_page = EXAMPLE.decode_pages
    rows = 2 * EXAMPLE.decode_block - EXAMPLE.read  # tokens of the last page that are not read
    row = 2 * DIM  # bytes of two heads of one token
    [address], [nbytes] = left.address.tolist(), left.nbytes.tolist()
    page = ours[0].regions[0].address + last_page * EXAMPLE.decode_block * row
    assert (address - page, nbytes) == ((EXAMPLE.decode_block - rows) * row, rows * row)


@pytest.mark.parametrize(("far", "near"), COPIES)
def test_copies_of_a_sub_block_match_the_picture(far: str, near: str) -> None:
    ours, theirs = decode(near), prefill(far)
    source, *_ = make_plan(ours, theirs, 0).sources
    found = build_copies(source, read_request((0, EXAMPLE.sub_block)))
    cells = [nbytes // DIM for nbytes in found.nbytes.tolist()]
    assert (len(cells), *set(cells)) == COPIES[far, near]
    assert found.nbytes.sum() == EXAMPLE.sub_block * 2 * DIM
