"""Pages handed over between an engine of an older commit and one of this, over each driver."""

from __future__ import annotations

import base64
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils import z85

from tests.upgrade.child import Child, ChildError, closing_all
from tests.upgrade.report import Report
from tests.upgrade.side import DIM, HEADS, LAYERS, content
from tests.upgrade.trees import SIDE, Tree

SECRET = "a secret of both engines"
TOKENS = 75
"""Tokens of a prompt; the last page is not full on either side."""
SHAPES = ((1, 1), (2, 1), (1, 2))
"""Ranks of the old engine, and of the new one."""
BLOCKS = {"old": 16, "new": 32}
"""Tokens in a page. The heads of a page come first on the old side, its tokens on the new one."""
RESERVED = 8
"""Pages that a request has at most."""
LONG_LEASE, SHORT_LEASE = 90.0, 9.0
"""In seconds; consumers renew thrice in a lease, and at once."""
SILENCE_SECONDS = 20.0
"""Seconds within which a producer must find silent holds; shorter than a third of a long lease."""
SETTLE_SECONDS = 1.0
"""Seconds by which a consumer's first sign of life may be later than its ticket."""
WAIT_SECONDS = 12.0
"""Longer than a short lease."""
RELEASE_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    name: str
    driver: str
    options: dict[str, Any] = field(default_factory=dict)
    encrypted: bool = False


WAYS = {
    "loopback": (
        Way(name="loopback", driver="loopback"),
        Way(name="loopback, side channels with keys", driver="loopback", encrypted=True),
    ),
    "ucx": (
        Way(name="ucx", driver="ucx"),
        Way(name="ucx over tcp", driver="ucx", options={"transports": ["self", "tcp"]}),
    ),
    "nixl": (Way(name="nixl", driver="nixl"),),
}
"""By driver."""


@dataclass(slots=True, kw_only=True)
class Side:
    name: str
    child: Child
    block: int
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def pages(self, tokens: int) -> list[int]:
        first = 1 + RESERVED * (next(self._numbers) % 7)
        count = -(-tokens // self.block)
        return list(range(first, first + count))[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    request: str
    params: dict[str, Any]
    seed: int
    secret: str


_seeds = itertools.count(1)


def serve(producer: Side, *, lease: float = LONG_LEASE, secret: str = "") -> Ticket:
    seed = next(_seeds)
    request = f"{producer.name}-{seed}"
    params = producer.child.ask(
        "serve",
        request=request,
        pages=producer.pages(TOKENS),
        tokens=TOKENS,
        seed=seed,
        lease=lease,
        secret=secret,
    )
    return Ticket(request=request, params=params, seed=seed, secret=secret)


def load(consumer: Side, ticket: Ticket) -> str:
    """Let an engine load the pages of a ticket; return what is wrong, or an empty text."""
    pages = consumer.pages(TOKENS)
    answer = consumer.child.ask(
        "load",
        request=f"of-{ticket.request}",
        ticket=ticket.params,
        pages=pages,
        secret=ticket.secret,
    )
    if answer["failed"]:
        return str(answer["failed"])
    wanted = np.zeros((LAYERS, len(pages) * consumer.block, HEADS, DIM), np.float32)
    wanted[:, :TOKENS] = content(ticket.seed, TOKENS)
    found = [_array(text, wanted.shape[1]) for text in answer["held"]]
    held = np.concatenate(found, axis=2)
    if held.shape != wanted.shape:
        return f"the ranks hold an array of {held.shape}, not {wanted.shape}"
    others = int((held.view(np.uint32) != wanted.view(np.uint32)).sum())
    return f"{others} of {wanted.size} numbers are others" if others else ""


def _array(text: str, tokens: int) -> npt.NDArray[np.float32]:
    data = np.frombuffer(base64.b64decode(text), np.float32)
    return data.reshape(LAYERS, tokens, -1, DIM)


def check_tickets(producer: Side, consumer: Side, report: Report) -> None:
    """Hand over a request with each kind of ticket that the producer makes."""
    way = f"{producer.name} to {consumer.name}"
    kinds = {"a proved ticket": "", "a proved and signed ticket": SECRET}
    for kind, secret in kinds.items():
        ticket = serve(producer, secret=secret)
        wrong = load(consumer, ticket)
        report.check(f"{way}: every byte came with {kind}", not wrong, wrong)
        told = producer.child.ask("released", request=ticket.request, seconds=RELEASE_SECONDS)
        report.check(f"{way}: the producer heard that it was read", told)


def check_claims(sides: Sequence[Side], report: Report) -> None:
    """Check that producers know which consumers wait, in both directions at once."""
    waits = [_wait(*pair, lease=LONG_LEASE) for pair in itertools.permutations(sides)]
    until = time.monotonic() + SILENCE_SECONDS
    for wait in waits:
        report.check(
            f"{wait.way}: heartbeats told the producer whose consumer lives", wait.is_known(until)
        )
        for ticket in (wait.claimed, wait.unclaimed):
            wrong = load(wait.consumer, ticket)
            report.check(f"{wait.way}: every byte came after a while", not wrong, wrong)
        wait.check_released(report)
        _check_abandoned(wait.producer, wait.consumer, report)


def check_renewals(sides: Sequence[Side], report: Report) -> None:
    """Check that renewals keep pages beyond a lease, in both directions at once."""
    waits = [_wait(*pair, lease=SHORT_LEASE) for pair in itertools.permutations(sides)]
    time.sleep(WAIT_SECONDS)
    for wait in waits:
        wrong = load(wait.consumer, wait.claimed)
        report.check(f"{wait.way}: renewals kept pages beyond their lease", not wrong, wrong)
        wrong = load(wait.consumer, wait.unclaimed)
        stale = wrong.startswith("stale:")
        report.check(f"{wait.way}: pages whose lease is over are not taken", stale, wrong)
        wait.check_released(report)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Two tickets of a producer: a consumer waits with one, and the other is unused."""

    producer: Side
    consumer: Side
    claimed: Ticket
    unclaimed: Ticket

    @property
    def way(self) -> str:
        return f"{self.producer.name} to {self.consumer.name}"

    def is_known(self, until: float) -> bool:
        """Return whether the producer finds, in time, that only the unused ticket is silent."""
        while self.unclaimed.request not in self._silent():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        time.sleep(SETTLE_SECONDS)
        while self.claimed.request in self._silent():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def _silent(self) -> list[str]:
        found: list[str] = self.producer.child.ask("silent")
        return found

    def check_released(self, report: Report) -> None:
        back = [
            self.producer.child.ask("released", request=ticket.request, seconds=RELEASE_SECONDS)
            for ticket in (self.claimed, self.unclaimed)
        ]
        report.check(f"{self.way}: all pages came back", all(back))


def _wait(producer: Side, consumer: Side, *, lease: float) -> Wait:
    claimed, unclaimed = (serve(producer, lease=lease) for _ in range(2))
    consumer.child.ask("prepare", ticket=claimed.params, secret=claimed.secret)
    return Wait(producer=producer, consumer=consumer, claimed=claimed, unclaimed=unclaimed)


def _check_abandoned(producer: Side, consumer: Side, report: Report) -> None:
    way = f"{producer.name} to {consumer.name}"
    ticket = serve(producer)
    consumer.child.ask(
        "abandon",
        request=f"of-{ticket.request}",
        ticket=ticket.params,
        pages=consumer.pages(TOKENS),
        secret=ticket.secret,
    )
    told = producer.child.ask("released", request=ticket.request, seconds=RELEASE_SECONDS)
    report.check(f"{way}: pages that were given up came back before their lease was over", told)


@contextmanager
def both(
    old: Tree, new: Tree, way: Way, shape: tuple[int, int], lease: float = LONG_LEASE
) -> Iterator[list[Side]]:
    keys = [secrets.token_bytes(32) if way.encrypted else b"" for _ in shape]
    peers = [z85.decode(zmq.curve_public(z85.encode(key))).hex() for key in keys if key]
    children: list[Child] = []
    with closing_all(children):
        for tree, ranks, key in zip((old, new), shape, keys, strict=True):
            settings = {
                "engine": f"engine-{tree.name}",
                "driver": way.driver,
                "options": way.options,
                "ranks": ranks,
                "block": BLOCKS[tree.name],
                "heads_first": tree.name == "old",
                "lease": lease,
                "key": key.hex(),
                "peers": peers,
            }
            children.append(Child(tree, tree.root / SIDE, settings))
        sides = [
            Side(name=tree.name, child=child, block=BLOCKS[tree.name])
            for tree, child in zip((old, new), children, strict=True)
        ]
        for side, tree in zip(sides, (old, new), strict=True):
            source = side.child.answer()["source"]
            if not source.startswith(f"{tree.root}/"):
                raise ChildError(f"the {side.name} engine runs {source}")
        yield sides


def check_driver(old: Tree, new: Tree, driver: str, report: Report) -> None:
    """Hand pages over in both directions, in each way that a driver has and in each shape."""
    for way, shape in itertools.product(WAYS[driver], SHAPES):
        report.heading(f"{way.name}: {shape[0]} old rank(s), {shape[1]} new")
        is_first = way is WAYS[driver][0]
        try:
            if shape == (1, 1):
                _check(old, new, way, shape, report, LONG_LEASE, check_claims)
            elif shape == (2, 1) and is_first:
                _check(old, new, way, shape, report, SHORT_LEASE, check_renewals)
            else:
                _check(old, new, way, shape, report)
        except ChildError as exc:
            report.check("neither engine fails", False, str(exc))


def _check(
    old: Tree,
    new: Tree,
    way: Way,
    shape: tuple[int, int],
    report: Report,
    lease: float = LONG_LEASE,
    holds: Callable[[Sequence[Side], Report], None] | None = None,
) -> None:
    with both(old, new, way, shape, lease) as sides:
        for producer, consumer in itertools.permutations(sides):
            check_tickets(producer, consumer, report)
        if holds is not None:
            holds(sides, report)
