"""One engine without a model, in a process of its own, that does what it is told over a pipe.

``make upgrade`` runs this file twice: with the code of an older commit and with that of this one.
Each tree is run by the file that stands in it, so what is imported below may be renamed together
with the rest. The commands, their keys and the sizes below are shared by two commits: add some, but
change and remove none, and keep this file where it is.

One JSON object a line comes in on stdin, and one goes out on stdout. The first that comes in holds
the ``Settings``; each later one names a method of ``Side`` under ``do``, with its arguments.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

import kvferry
from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import KVFerryError, StaleError, TicketError
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.security import Access, KeyPair, TicketKey, TicketSecrets
from kvferry.core.transport import registry
from kvferry.integrations.vllm.ticket_params import TicketParams, read_ticket
from kvferry.testing.engines import CacheShape, EngineRank, ModelFreeEngine

LAYERS, HEADS, DIM, PAGES = 2, 4, 16, 64
OUTCOME_SECONDS = 90.0

Params = dict[str, Any]
"""A ticket, as ``kv_transfer_params``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine is.

    Attributes:
        engine: its id.
        driver, options: its transport.
        ranks: how many tensor-parallel ranks it has, which share out the heads.
        block: tokens in a page.
        heads_first: whether a page is [heads, tokens, DIM] rather than [tokens, heads, DIM].
        lease: seconds, of which a consumer lets a third pass between two renewals.
        key: its secret CURVE key in hexadecimal; empty for an open side channel.
        peers: public keys of the engines that are admitted, in hexadecimal.
    """

    engine: str
    driver: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    block: int = 16
    heads_first: bool = True
    lease: float = 30.0
    key: str = ""
    peers: list[str] = field(default_factory=list)

    @property
    def shape(self) -> CacheShape:
        """How the engine keeps its cache."""
        return CacheShape(
            tp=self.ranks,
            block=self.block,
            heads_first=self.heads_first,
            pages=PAGES,
            layers=LAYERS,
            model_heads=HEADS,
            dim=DIM,
        )

    @property
    def access(self) -> Access:
        """The engine's keys."""
        if not self.key:
            return Access()
        own = KeyPair.of(self.key, "the setting 'key'")
        return Access(own=own, peers=frozenset(map(bytes.fromhex, self.peers)))


def why(error: KVFerryError) -> str:
    """Return why it failed, after a fixed word: ``stale``, or the reason to refuse a ticket."""
    if isinstance(error, TicketError):
        return f"{error.reason.value}: {error}"
    return f"{'stale' if isinstance(error, StaleError) else 'failure'}: {error}"


def content(seed: int, tokens: int) -> npt.NDArray[np.float32]:
    """Return what a prompt's cache holds: (layer, token, head, element)."""
    return np.random.default_rng(seed).random((LAYERS, tokens, HEADS, DIM), dtype=np.float32)


def held(rank: EngineRank, pages: list[int]) -> str:
    """Return all bytes of a rank's pages as (layer, token, head, element), in base64."""
    values = np.stack([rank.read(layer, pages) for layer in range(LAYERS)])
    return base64.b64encode(values.tobytes()).decode()


class Side:
    """An engine of several ranks in one process. Its methods are the commands."""

    def __init__(self, settings: Settings) -> None:
        self._ticket_key = TicketKey()
        self.engine = ModelFreeEngine(
            settings.engine,
            settings.shape,
            driver=settings.driver,
            transport=partial(registry.create, settings.driver, settings.options),
            options=EndpointOptions(lease=settings.lease, access=settings.access),
            agreement={"model": "none"},
            ticket_key=self._ticket_key,
        )

    def facts(self) -> dict[str, Any]:
        """Return what this build is: where its code is, and what it knows."""
        return {"source": kvferry.__file__, "proves": True, "heartbeats": True}

    def serve(
        self, request: str, pages: list[int], tokens: int, seed: int, lease: float, secret: str
    ) -> Params:
        """Compute a request for another engine; return its ticket, proved."""
        self.engine.take_on(request)
        values = content(seed, tokens)
        for rank in self.engine.ranks:
            for layer in range(LAYERS):
                rank.write(layer, pages, values[layer, :, rank.heads.start : rank.heads.stop])
        ticket = self.engine.finish(request, pages, tokens, lease=lease)
        offer = TicketParams(
            engine=ticket.engine,
            incarnation=ticket.incarnation,
            request=request,
            host=ticket.host,
            port=ticket.port,
            hold=ticket.hold,
            pages=(tuple(pages),),
            first_index=(0,),
            tokens=tokens,
            digest=ticket.digest,
            computed=True,
            tp_size=ticket.tp_size,
            key=ticket.key,
        )
        return offer.params(self._secrets(secret), self._ticket_key)

    def prepare(self, ticket: Params, secret: str) -> bool:
        """Wait for pages with a ticket: shake hands, and renew its hold."""
        self.engine.prepare(read_ticket(ticket, self._secrets(secret)))
        return True

    def load(self, request: str, ticket: Params, pages: list[int], secret: str) -> dict[str, Any]:
        """Load all tokens; return ``failed``, a word for why and more, and ``held``, the bytes."""
        for rank in self.engine.ranks:
            rank.cache[:, pages] = np.nan
        try:
            known = read_ticket(ticket, self._secrets(secret))
        except KVFerryError as exc:
            return {"failed": why(exc), "held": []}
        self.engine.pull(request, known, pages)
        failed = self._outcome(request)
        return {"failed": failed, "held": [held(rank, pages) for rank in self.engine.ranks]}

    def abandon(self, request: str, ticket: Params, pages: list[int], secret: str) -> str:
        """Begin to load and give it up before the first byte; return why it failed."""
        known = read_ticket(ticket, self._secrets(secret))
        self.engine.pull(request, known, pages, passed=lambda: False)
        for rank in self.engine.ranks:
            rank.endpoint.abort(RequestId(request))
        return self._outcome(request)

    def _outcome(self, request: str) -> str:
        """Wait for every rank's report; return the first failure, or an empty text."""
        try:
            failed = self.engine.outcome(request, OUTCOME_SECONDS).failed
        except TimeoutError as exc:
            return str(exc)
        return next(map(why, failed.values()), "")

    def released(self, request: str, seconds: float) -> bool:
        """Return whether every rank reports, in time, that a request's pages may be given back."""
        try:
            self.engine.released(request, seconds)
        except TimeoutError:
            return False
        return True

    def silent(self) -> list[str]:
        """Return the requests of whose consumers no rank has heard for some seconds."""
        ranks = self.engine.ranks
        reports = [{str(each.request) for each in rank.endpoint.silent()} for rank in ranks]
        return sorted(set.intersection(*reports))

    @staticmethod
    def _secrets(secret: str) -> TicketSecrets | None:
        return TicketSecrets.of([secret]) if secret else None


def answer(side: Side, message: dict[str, Any]) -> Any:
    """Do what a message says; return what there is to answer."""
    name = message.pop("do")
    if name.startswith("_") or not hasattr(side, name):
        raise ValueError(f"unknown command {name!r}")
    return getattr(side, name)(**message)


def serve(lines: TextIO, replies: TextIO) -> None:
    """Be an engine until there is nothing more to read."""

    def reply(what: dict[str, Any]) -> None:
        replies.write(json.dumps(what) + "\n")
        replies.flush()

    with ExitStack() as stack:
        try:
            side = Side(Settings(**json.loads(next(lines))))
            stack.enter_context(side.engine)
        except (KVFerryError, OSError) as exc:
            reply({"error": f"{type(exc).__name__}: {exc}"})
            return
        reply({"answer": side.facts()})
        for line in lines:
            try:
                reply({"answer": answer(side, json.loads(line))})
            except (KVFerryError, OSError, ValueError) as exc:
                reply({"error": f"{type(exc).__name__}: {exc}"})


def main() -> None:
    """Serve over stdin and stdout; whatever libraries print goes to stderr."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
