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
import time
from collections.abc import Container
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

import kvferry
from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load
from kvferry.core.errors import KVFerryError, StaleError, TicketError
from kvferry.core.handshake import HandshakeServer
from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.digest import digest
from kvferry.core.lifecycle.holds import Incarnation, RequestId, random_incarnation
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import region_of
from kvferry.core.messages import Coordinates
from kvferry.core.planner.build_copies import Pages
from kvferry.core.security import Access, KeyPair, TicketKey, TicketSecrets
from kvferry.core.side_channel_messages import encode
from kvferry.core.transport import registry
from kvferry.integrations.vllm.ticket_params import ParallelSizes, TicketParams, read_ticket

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
    def heads(self) -> int:
        """Heads of each rank."""
        return HEADS // self.ranks


def why(error: KVFerryError) -> str:
    """Return why it failed, after a fixed word: ``stale``, or the reason to refuse a ticket."""
    if isinstance(error, TicketError):
        return f"{error.reason.value}: {error}"
    return f"{'stale' if isinstance(error, StaleError) else 'failure'}: {error}"


def content(seed: int, tokens: int) -> npt.NDArray[np.float32]:
    """Return what a prompt's cache holds: (layer, token, head, element)."""
    return np.random.default_rng(seed).random((LAYERS, tokens, HEADS, DIM), dtype=np.float32)


class Rank:
    """One rank: its cache, its endpoint and what the endpoint has reported."""

    def __init__(
        self, settings: Settings, rank: int, incarnation: Incarnation, access: Access
    ) -> None:
        self._settings = settings
        block, heads = settings.block, settings.heads
        inner = (heads, block) if settings.heads_first else (block, heads)
        self.cache = np.full((LAYERS, PAGES, *inner, DIM), np.nan, dtype=np.float32)
        self.heads = slice(rank * heads, (rank + 1) * heads)
        self.endpoint = Endpoint(
            identity=Identity(
                engine=settings.engine,
                incarnation=incarnation,
                rank=rank,
                coordinates=Coordinates(tp=rank),
                agreement={"model": "none"},
            ),
            driver=settings.driver,
            transport=registry.create(settings.driver, settings.options),
            layout=self._layout(),
            slots=PAGES,
            options=EndpointOptions(lease=settings.lease, access=access),
        )
        self.sent: set[str] = set()
        self.received: dict[str, KVFerryError | None] = {}

    def _layout(self) -> Layout:
        row = DIM * self.cache.itemsize
        block, heads = self._settings.block, self._settings.heads
        page = block * heads * row
        token, head = (row, block * row) if self._settings.heads_first else (heads * row, row)
        fields = tuple(
            Field(
                key=f"layer.{layer}",
                group=0,
                region=0,
                offset=layer * PAGES * page,
                page_stride=page,
                pages=PAGES,
                dtype="float32",
                unit=row,
                tokens=axis((block, token)),
                shard=axis((heads, head)),
                shard_range=(self.heads.start, self.heads.stop),
            )
            for layer in range(LAYERS)
        )
        group = Group(kind=GroupKind.PAGED, block_tokens=block)
        return Layout(regions=(region_of(self.cache),), groups=(group,), fields=fields)

    def fill(self, pages: list[int], seed: int, tokens: int) -> None:
        """Write a prompt's cache into pages, with zeros after its last token."""
        block, heads = self._settings.block, self._settings.heads
        values = np.zeros((LAYERS, len(pages) * block, heads, DIM), dtype=np.float32)
        values[:, :tokens] = content(seed, tokens)[:, :, self.heads]
        blocks = values.reshape(LAYERS, len(pages), block, heads, DIM)
        self.cache[:, pages] = blocks.swapaxes(2, 3) if self._settings.heads_first else blocks

    def held(self, pages: list[int]) -> str:
        """Return all bytes of pages as (layer, token, head, element), in base64."""
        blocks = self.cache[:, pages]
        if self._settings.heads_first:
            blocks = blocks.swapaxes(2, 3)
        return base64.b64encode(np.ascontiguousarray(blocks).tobytes()).decode()

    def until(self, request: str, reported: Container[str], seconds: float) -> bool:
        """Wait until a request is reported: ``sent`` or ``received``.

        Returns:
            Whether it was, in that time.
        """
        deadline = time.monotonic() + seconds
        while True:
            results = self.endpoint.results()
            self.sent.update(results.sent)
            self.received.update({each: results.failed.get(each) for each in results.received})
            if request in reported or time.monotonic() > deadline:
                return request in reported
            self.endpoint.wait(0.05)


class Side:
    """An engine of several ranks in one process. Its methods are the commands."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings = settings
        access = Access()
        if settings.key:
            own = KeyPair.of(settings.key, "the setting 'key'")
            access = Access(own=own, peers=frozenset(map(bytes.fromhex, settings.peers)))
        self._access = access
        self._incarnation = random_incarnation()
        self._ledger = SchedulerHolds(PAGES)
        self._ticket_key = TicketKey()
        self._ranks = []
        for index in range(settings.ranks):
            rank = Rank(settings, index, self._incarnation, access)
            stack.enter_context(rank.endpoint)
            self._ranks.append(rank)
        payloads = [rank.endpoint.payload for rank in self._ranks]
        self._server = HandshakeServer(
            [encode(payload) for payload in payloads],
            engine=settings.engine,
            incarnation=self._incarnation,
            access=access,
            ticket_key=self._ticket_key.public,
        )
        stack.enter_context(self._server)
        for rank in self._ranks:
            rank.endpoint.join(payloads)
            rank.endpoint.prove(self._ticket_key.public)

    def facts(self) -> dict[str, Any]:
        """Return what this build is: where its code is, and what it knows."""
        return {"source": kvferry.__file__, "proves": True, "heartbeats": True}

    def serve(
        self, request: str, pages: list[int], tokens: int, seed: int, lease: float, secret: str
    ) -> Params:
        """Compute a request for another engine.

        Args:
            request: what to call it.
            pages: where its cache goes.
            tokens, seed: its prompt.
            lease: for how many seconds the pages are held without a renewal.
            secret: signs the ticket; empty for none.

        Returns:
            The ticket, proved.
        """
        name = RequestId(request)
        self._ledger.take_on(name)
        self._step()
        for rank in self._ranks:
            rank.fill(pages, seed, tokens)
        hold = self._ledger.ticket(name, lease, frozenset(pages))
        self._step()
        if hold is None:
            raise ValueError(f"{request} has no hold")
        offer = TicketParams(
            engine=self._settings.engine,
            incarnation=self._incarnation,
            request=request,
            host=self._server.host,
            port=self._server.port,
            hold=hold,
            pages=[pages],
            first_index=[0],
            tokens=tokens,
            digest=digest(range(tokens)),
            computed=True,
            sizes=ParallelSizes(tp=len(self._ranks)),
            key=self._access.public,
        )
        return offer.params(self._secrets(secret), self._ticket_key)

    def _step(self) -> None:
        orders = self._ledger.drain()
        for rank in self._ranks:
            rank.endpoint.apply(orders)

    def prepare(self, ticket: Params, secret: str) -> bool:
        """Wait for pages with a ticket: shake hands, and renew its hold."""
        known = read_ticket(ticket, self._secrets(secret))
        for rank in self._ranks:
            rank.endpoint.prepare(known)
        return True

    def load(self, request: str, ticket: Params, pages: list[int], secret: str) -> dict[str, Any]:
        """Load all tokens of a ticket.

        Returns:
            ``failed``, why not, or an empty text, which begins with a word for the cause; and
            ``held``, each rank's bytes of the pages.
        """
        for rank in self._ranks:
            rank.cache[:, pages] = np.nan
        try:
            known = read_ticket(ticket, self._secrets(secret))
        except KVFerryError as exc:
            return {"failed": why(exc), "held": []}
        for rank in self._ranks:
            rank.endpoint.load(self._load_of(request, known, pages))
        failed = self._outcome(request)
        return {"failed": failed, "held": [rank.held(pages) for rank in self._ranks]}

    def abandon(self, request: str, ticket: Params, pages: list[int], secret: str) -> str:
        """Begin to load and give it up before the first byte; return why it failed."""
        known = read_ticket(ticket, self._secrets(secret))
        for rank in self._ranks:
            rank.endpoint.load(self._load_of(request, known, pages), lambda: False)
            rank.endpoint.abort(RequestId(request))
        return self._outcome(request)

    def _load_of(self, request: str, ticket: Ticket, pages: list[int]) -> Load:
        return Load(
            request=RequestId(request),
            ticket=ticket,
            ranges=((0, ticket.tokens),),
            local=(Pages(ids=np.array(pages, dtype=np.int64)),),
        )

    def _outcome(self, request: str) -> str:
        """Wait for every rank's report; return the first failure, or an empty text."""
        failed = []
        for rank in self._ranks:
            if not rank.until(request, rank.received, OUTCOME_SECONDS):
                return f"no outcome within {OUTCOME_SECONDS:.0f} s"
            error = rank.received.pop(request)
            failed += [why(error)] if error else []
        return failed[0] if failed else ""

    def released(self, request: str, seconds: float) -> bool:
        """Return whether every rank reports, in time, that a request's pages may be given back."""
        if not all(rank.until(request, rank.sent, seconds) for rank in self._ranks):
            return False
        self._ledger.sent(RequestId(request))
        return True

    def silent(self) -> list[str]:
        """Return the requests of whose consumers no rank has heard for some seconds."""
        reports = [{str(each.request) for each in rank.endpoint.silent()} for rank in self._ranks]
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
            side = Side(Settings(**json.loads(next(lines))), stack)
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
