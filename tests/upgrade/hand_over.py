"""Pages handed over between an engine of an older commit and one of this, over each driver."""

from __future__ import annotations

import base64
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
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
LEASE, WAIT_SECONDS = 9.0, 12.0
"""In seconds; consumers renew thrice in a lease, and at once."""
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


def serve(producer: Side, *, lease: float = 90.0, secret: str = "") -> Ticket:
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
        told = is_released(producer, ticket)
        report.check(f"{way}: the producer heard that it was read", told)


def is_released(producer: Side, ticket: Ticket) -> bool:
    """Return whether a request's pages come back."""
    return bool(producer.child.ask("released", request=ticket.request, seconds=RELEASE_SECONDS))


def check_renewals(sides: Sequence[Side], report: Report) -> None:
    """Check that renewals keep pages beyond a lease, in both directions at once."""
    pairs = list(itertools.permutations(sides))
    waits = [(serve(producer, lease=LEASE), serve(producer, lease=LEASE)) for producer, _ in pairs]
    for (_, consumer), (claimed, _) in zip(pairs, waits, strict=True):
        consumer.child.ask("prepare", ticket=claimed.params, secret=claimed.secret)
    time.sleep(WAIT_SECONDS)
    for (producer, consumer), (claimed, unclaimed) in zip(pairs, waits, strict=True):
        way = f"{producer.name} to {consumer.name}"
        wrong = load(consumer, claimed)
        report.check(f"{way}: renewals kept pages beyond their lease", not wrong, wrong)
        wrong = load(consumer, unclaimed)
        stale = wrong.startswith("stale:")
        report.check(f"{way}: pages whose lease is over are not taken", stale, wrong)
        back = [is_released(producer, ticket) for ticket in (claimed, unclaimed)]
        report.check(f"{way}: all pages came back", all(back))


@contextmanager
def both(old: Tree, new: Tree, way: Way, shape: tuple[int, int]) -> Iterator[list[Side]]:
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
                "lease": LEASE,
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
        try:
            with both(old, new, way, shape) as sides:
                for producer, consumer in itertools.permutations(sides):
                    check_tickets(producer, consumer, report)
                if shape == (1, 1):
                    check_renewals(sides, report)
        except ChildError as exc:
            report.check("neither engine fails", False, str(exc))
