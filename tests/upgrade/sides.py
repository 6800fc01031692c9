"""Engines without a model, each run by the ``side.py`` of a tree, and what they hand over."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from zmq.utils import z85

from tests.upgrade.side import DIM, HEADS, LAYERS, content
from tests.upgrade.trees import Tree

SECRET = "a secret of both engines"
TOKENS = 75
"""Tokens of a prompt; the last page is not full on either side."""
BLOCKS = (16, 32)
"""Tokens in a page of either side. The heads of a page come first on the one, its tokens on the
other."""
RESERVED = 8
"""Pages that a request has at most."""
ANSWER_SECONDS, RELEASE_SECONDS = 110.0, 20.0
EXCERPT = 4000
"""Characters of a log that an error shows."""

_seeds = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    request: str
    params: dict[str, Any]
    seed: int
    secret: str

    @property
    def known(self) -> dict[str, Any]:
        """What every command takes of it."""
        return {"ticket": self.params, "secret": self.secret}


class Side:
    """An engine in a process of its own; closing it twice is fine."""

    def __init__(self, tree: Tree, **settings: Any) -> None:
        self.name, self.block = tree.name, settings["block"]
        self._log = tree.folder / f"side-{next(_seeds)}.log"
        self._numbers = itertools.count()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(tree.root / "tests/upgrade/side.py")],
                cwd=tree.folder,
                env=os.environ | {"PYTHONPATH": f"{tree.folder / 'metadata'}:{tree.root}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._send(settings)

    def ask(self, do: str, **arguments: Any) -> Any:
        self._send({"do": do, **arguments})
        return self.answer()

    def answer(self) -> Any:
        """Wait for the next answer: the first one comes when the process is ready."""
        assert self._process.stdout is not None
        patience = threading.Timer(ANSWER_SECONDS, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        reply = json.loads(line or '{"error": "nothing any more"}')
        if "error" in reply:
            log = self._log.read_text("utf-8", "replace")[-EXCERPT:]
            raise RuntimeError(f"{self.name} says: {reply['error']}\n{log}")
        return reply["answer"]

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.wait()

    def serve(self, *, lease: float, secret: str = "") -> Ticket:
        """Prefill for another engine."""
        seed = next(_seeds)
        request, pages = f"{self.name}-{seed}", self._pages()
        asked = {"request": request, "pages": pages, "lease": lease, "secret": secret}
        params = self.ask("serve", tokens=TOKENS, seed=seed, **asked)
        return Ticket(request=request, params=params, seed=seed, secret=secret)

    def load(self, ticket: Ticket) -> str:
        """Load the pages of a ticket; return what is wrong, or an empty text."""
        request, pages = f"of-{ticket.request}", self._pages()
        answer = self.ask("load", request=request, pages=pages, **ticket.known)
        if answer["failed"]:
            return str(answer["failed"])
        wanted = np.zeros((LAYERS, len(pages) * self.block, HEADS, DIM), np.float32)
        wanted[:, :TOKENS] = content(ticket.seed, TOKENS)
        found = [np.frombuffer(base64.b64decode(text), np.float32) for text in answer["held"]]
        shape = LAYERS, wanted.shape[1], -1, DIM
        held = np.concatenate([each.reshape(shape) for each in found], axis=2)
        others = int((held.view(np.uint32) != wanted.view(np.uint32)).sum())
        return f"{others} of {wanted.size} numbers are others" if others else ""

    def abandon(self, ticket: Ticket) -> None:
        """Begin to load, and give it up."""
        request = f"of-{ticket.request}"
        self.ask("abandon", request=request, pages=self._pages(), **ticket.known)

    def released(self, *tickets: Ticket) -> bool:
        """Return whether the pages of all come back."""
        asked = ({"request": each.request, "seconds": RELEASE_SECONDS} for each in tickets)
        return all([self.ask("released", **each) for each in asked])

    def silent(self, ticket: Ticket) -> bool:
        """Return whether nobody has been heard of who waits for a ticket's pages."""
        return ticket.request in self.ask("silent")

    def _pages(self) -> list[int]:
        first = 1 + RESERVED * (next(self._numbers) % 7)
        return list(range(first, first - (-TOKENS // self.block)))[::-1]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How two engines exchange pages, and how many ranks they have."""

    driver: str
    ranks: tuple[int, int] = (1, 1)
    lease: float = 90.0
    options: dict[str, Any] = field(default_factory=dict)
    encrypted: bool = False


@contextlib.contextmanager
def two_sides(trees: tuple[Tree, Tree], way: Way) -> Iterator[tuple[Side, Side]]:
    """An engine of each tree; in seconds, consumers renew thrice in a lease, and at once."""
    keys = [secrets.token_bytes(32) if way.encrypted else b"" for _ in trees]
    peers = [z85.decode(zmq.curve_public(z85.encode(key))).hex() for key in keys if key]
    with contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(
                contextlib.closing(
                    Side(
                        tree,
                        engine=f"engine-{tree.name}",
                        driver=way.driver,
                        options=way.options,
                        ranks=way.ranks[number],
                        block=BLOCKS[number],
                        heads_first=number == 0,
                        lease=way.lease,
                        key=keys[number].hex(),
                        peers=peers,
                    )
                )
            )
            for number, tree in enumerate(trees)
        ]
        for side, tree in zip(sides, trees, strict=True):
            assert Path(side.answer()["source"]).is_relative_to(tree.root)
        yield sides[0], sides[1]


def check_tickets(sides: tuple[Side, Side], way: Way) -> None:
    """Hand over a request in both directions with each kind of ticket: proved, and signed, too."""
    for (producer, consumer), secret in itertools.product(
        itertools.permutations(sides), ("", SECRET)
    ):
        ticket = producer.serve(lease=way.lease, secret=secret)
        assert consumer.load(ticket) == "", f"{producer.name} to {consumer.name}"
        assert producer.released(ticket), "the producer did not hear that it was read"
