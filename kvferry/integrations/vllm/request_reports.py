"""What an operator sees of each request: one log line on either engine, and spans.

The lines of both engines have the id that the request has on the prefill engine, so that one can
follow a request through the logs of both. ``tracing`` makes the spans.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.core.error_causes import on_one_line
from kvferry.core.lifecycle.holds import EndedHold, HoldEnd
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.metrics import LoadRecord, Stage
from kvferry.integrations.vllm.tracing import Headers, RequestSpans

logger = logging.getLogger("kvferry.requests")
"""The logger of the lines; their level is INFO."""

HOLD_ENDS: Mapping[HoldEnd, str] = {
    HoldEnd.READ: "were read",
    HoldEnd.ABANDONED: "were abandoned",
    HoldEnd.EXPIRED: "expired",
    HoldEnd.EVICTED: "were evicted",
    HoldEnd.RECLAIMED: "were reclaimed",
    HoldEnd.ORPHANED: "were orphaned",
    HoldEnd.REVOKED: "were revoked",
}
"""How the line says that a hold has ended. If the hold of a prompt is evicted, a warning says so
instead."""


@dataclass(slots=True, kw_only=True)
class HeldRequest:
    """A request whose ticket was made on this engine.

    Attributes:
        request_id: vLLM's id of the request.
        tokens: How many tokens the ticket covers.
        blocks: How many blocks are held.
        made: When the ticket was made, in monotonic seconds.
        is_conversation: Whether it is an answer that is held for the conversation's next turn.
        headers: The request's trace headers.
        ended: How the hold ended on the ranks that have reported that; ``None`` if none has.
    """

    request_id: str
    tokens: int
    blocks: int
    made: float
    is_conversation: bool = False
    headers: Headers = None
    ended: EndedHold | None = None


@dataclass(slots=True, kw_only=True)
class LoadingRequest:
    """A request whose load is under way on this engine.

    Attributes:
        request_id: vLLM's id of the request.
        ticket: Its ticket, which has the prefill engine and the request's id there.
        tokens: How many tokens are loaded.
        begun: When it got its blocks, in seconds since the epoch.
        headers: The request's trace headers.
        record: The figures of the load on the ranks that have reported them; ``None`` if none has.
        is_aborted: Whether the request has ended already.
        is_early: Whether the load began before the ticket came.
    """

    request_id: str
    ticket: Ticket
    tokens: int
    begun: float
    headers: Headers = None
    record: LoadRecord | None = None
    is_aborted: bool = False
    is_early: bool = False


class RequestReports:
    """Log one line about each request, and make its spans.

    Args:
        log: Whether to log.
        spans: Makes spans; ``None`` to make none.
    """

    def __init__(self, *, log: bool = False, spans: RequestSpans | None = None) -> None:
        self._log = log
        self._spans = spans

    def loaded(self, request: LoadingRequest) -> None:
        """Report a load that succeeded. Without figures of a rank, nothing is reported."""
        record, ticket = request.record, request.ticket
        if record is None:
            return
        if self._log:
            logger.info(
                "request %s: loaded %d tokens (%.1f MiB%s) of request %s from engine %s in %.1f ms "
                "(%s)",
                on_one_line(request.request_id),
                request.tokens,
                record.nbytes / (1 << 20),
                _describe_early(request, record),
                on_one_line(ticket.request),
                on_one_line(ticket.engine),
                record.seconds * 1e3,
                _describe_stages(record),
            )
        if self._spans is not None:
            attributes = _describe_load(request) | {"bytes": record.nbytes}
            if request.is_early:
                attributes["early_bytes"] = record.early_nbytes
            self._spans.loaded(request.headers, record, **attributes)

    def failed(self, request: LoadingRequest) -> None:
        """Report a load that failed. The ranks have logged it, so only a span is made."""
        if self._spans is not None:
            self._spans.failed(request.headers, request.begun, **_describe_load(request))

    def nothing_loaded(self, request_id: str, ticket: Ticket, why: str) -> None:
        """Report a request that gave its ticket back without a load.

        Args:
            request_id: vLLM's id of the request.
            ticket: Its ticket.
            why: Why nothing was loaded, for the line.
        """
        if self._log:
            logger.info(
                "request %s: loaded nothing of request %s from engine %s: %s",
                on_one_line(request_id),
                on_one_line(ticket.request),
                on_one_line(ticket.engine),
                why,
            )

    def hold_ended(self, request: HeldRequest, end: HoldEnd, seconds: float) -> None:
        """Report that the blocks of a request are no longer held.

        Args:
            request: The request.
            end: How its hold ended.
            seconds: How long the blocks were held.
        """
        reader = request.ended.engine if request.ended is not None else ""
        if self._log and (end is not HoldEnd.EVICTED or request.is_conversation):
            logger.info(
                "request %s: its %d tokens (%d blocks) %s%s after %.2f s",
                on_one_line(request.request_id),
                request.tokens,
                request.blocks,
                HOLD_ENDS[end],
                f" by engine {on_one_line(reader)}" if reader else "",
                seconds,
            )
        if self._spans is not None:
            self._spans.held(
                request.headers,
                seconds,
                request=request.request_id,
                tokens=request.tokens,
                blocks=request.blocks,
                outcome=end.value,
            )


def _describe_load(request: LoadingRequest) -> dict[str, str | int]:
    """Return the attributes of the span of a load, whether or not it succeeded."""
    return {
        "request": request.request_id,
        "prefill_request": request.ticket.request,
        "prefill_engine": request.ticket.engine,
        "tokens": request.tokens,
    }


def _describe_early(request: LoadingRequest, record: LoadRecord) -> str:
    """Return how much of a load came before its ticket, as text; empty if it did not begin then."""
    return f", {record.early_nbytes / (1 << 20):.1f} of it early" if request.is_early else ""


def _describe_stages(record: LoadRecord) -> str:
    """Return how many milliseconds each stage of a load took, as text."""
    seconds = {Stage.HANDSHAKE: record.handshake_seconds} | record.stages
    known = [stage for stage in Stage if stage in seconds]
    return ", ".join(f"{stage.value} {seconds[stage] * 1e3:.1f}" for stage in known)
