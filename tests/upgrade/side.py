"""One engine without a model, in a process of its own, that does what it is told over a pipe.

``make upgrade`` runs this file twice: with the code of an older commit and with that of this one.
Each tree is run by the file that stands in it, so what is imported below may be renamed together
with the rest. The commands, their keys and the sizes below are shared by two commits: add some, but
change and remove none, and keep this file where it is.

One JSON object a line comes in on stdin, and one goes out on stdout. The first that comes in holds
the arguments of ``Side``; each later one names a method of it under ``do``, with its arguments.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
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
from kvferry.integrations.vllm.ticket_format import TicketParams, read_ticket
from kvferry.testing.engines import CacheShape, EngineRank, ModelFreeEngine

LAYERS, HEADS, DIM, PAGES = 2, 4, 16, 64
OUTCOME_SECONDS = 90.0

Params = dict[str, Any]
"""A ticket, as ``kv_transfer_params``."""


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
    """An engine of several ranks in one process. Its methods are the commands.

    Args:
        engine: Its id.
        driver: The name of its driver, whose ``options`` these are.
        options: See ``driver``.
        ranks: How many tensor-parallel ranks it has, which share out the heads.
        block: Tokens in a page.
        heads_first: Whether a page is [heads, tokens, DIM] rather than [tokens, heads, DIM].
        lease: Seconds, of which a consumer lets a third pass between two renewals.
        key: Its secret CURVE key in hexadecimal; empty for an open side channel.
        peers: Public keys of the engines that are admitted, in hexadecimal.
    """

    def __init__(
        self,
        *,
        engine: str,
        driver: str,
        options: dict[str, Any],
        ranks: int,
        block: int,
        heads_first: bool,
        lease: float,
        key: str,
        peers: list[str],
    ) -> None:
        shape = CacheShape(
            tp=ranks,
            block=block,
            heads_first=heads_first,
            pages=PAGES,
            layers=LAYERS,
            model_heads=HEADS,
            dim=DIM,
        )
        access = Access()
        if key:
            own = KeyPair.of(key, "the setting 'key'")
            access = Access(own=own, peers=frozenset(map(bytes.fromhex, peers)))
        self._ticket_key = TicketKey()
        self.engine = ModelFreeEngine(
            engine,
            shape,
            driver=driver,
            transport=partial(registry.create, driver, options),
            options=EndpointOptions(lease=lease, access=access),
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


def serve(lines: TextIO, replies: TextIO) -> None:
    """Be an engine until there is nothing more to read."""

    def reply(make: Callable[[], Any]) -> None:
        try:
            said = {"answer": make()}
        except (KVFerryError, OSError, ValueError) as exc:
            said = {"error": f"{type(exc).__name__}: {exc}"}
        replies.write(json.dumps(said) + "\n")
        replies.flush()

    with ExitStack() as stack:
        sides: list[Side] = []

        def start() -> dict[str, Any]:
            sides.append(Side(**json.loads(next(lines))))
            stack.enter_context(sides[0].engine)
            return sides[0].facts()

        reply(start)
        for line in lines:
            message = json.loads(line)
            reply(partial(getattr(sides[0], message.pop("do")), **message))


def main() -> None:
    """Serve over stdin and stdout; whatever libraries print goes to stderr."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
