"""What an operator sees of each request: one log line on either engine, and spans.

The lines are at DEBUG, or at INFO with ``log_requests``: at 100 requests a second they would fill a
disk, and vLLM's line of metrics sums up each interval (``metrics``). The lines of both engines have
the id that the request has on the prefill engine, so that one can follow a request through the logs
of both. ``tracing`` makes the spans.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.core.error_causes import on_one_line
from kvferry.core.lifecycle.holds import EndedHold, HoldEnd, RequestId
from kvferry.core.metrics import MAX_NAME
from kvferry.integrations.vllm.tracing import Headers, RequestSpans

if TYPE_CHECKING:
    from kvferry.integrations.vllm.consumer import Pull

logger = logging.getLogger("kvferry.requests")
"""The logger of the lines."""


@dataclass(slots=True, kw_only=True)
class HeldRequest:
    """A request whose ticket was made on this engine."""

    request_id: RequestId
    tokens: int  # that the ticket covers
    blocks: int  # that are held
    made: float  # when the ticket was made, in monotonic seconds
    is_conversation: bool = False  # whether it is an answer, held for the next turn
    sample: tuple[str, bytes] = "", b""  # if others use its ticket: see ``Producer``
    ticket: dict[str, Any] | None = None  # likewise
    headers: Headers = None
    ended: EndedHold | None = None  # how the hold ended on the ranks that have reported that


class RequestReports:
    """Log one line about each request, at INFO if ``log``, else at DEBUG, and make its spans."""

    def __init__(self, *, log: bool = False, spans: RequestSpans | None = None) -> None:
        self.level = logging.INFO if log else logging.DEBUG
        self._spans = spans

    def load_ended(self, pull: Pull, *, is_loaded: bool) -> None:
        """Report a load. The ranks have logged it if it failed, so only a span is made.

        Without figures of a rank, nothing is reported of one that succeeded.
        """
        record, ticket, headers = pull.record, pull.ticket, pull.request.trace_headers
        if ticket is None:
            return
        attributes: dict[str, str | int] = {
            "request": pull.request_id,
            "prefill_request": ticket.request,
            "prefill_engine": ticket.engine,
            "tokens": pull.tokens,
        }
        if not is_loaded and self._spans is not None:
            self._spans.failed(headers, pull.begun, **attributes)
        if not is_loaded or record is None:
            return
        waited, read = record.waiting_and_reading
        logger.log(
            self.level,
            "request %s (here %s): loaded %d tokens, %.1f MiB%s, from %s: waited %.1f ms, read in "
            "%.1f ms",
            on_one_line(ticket.request),
            on_one_line(pull.request_id),
            pull.tokens,
            record.nbytes / (1 << 20),
            f" ({record.early_nbytes / (1 << 20):.1f} early)" if pull.is_early else "",
            on_one_line(ticket.engine, MAX_NAME),
            waited * 1e3,
            read * 1e3,
        )
        if self._spans is not None:
            early = {"early_bytes": record.early_nbytes} if pull.is_early else {}
            self._spans.loaded(headers, record, **attributes, bytes=record.nbytes, **early)

    def hold_ended(self, request: HeldRequest, end: HoldEnd, seconds: float) -> None:
        """Report that blocks are no longer held."""
        reader = request.ended.engine if request.ended is not None else ""
        logger.log(
            self.level,
            "request %s: %d tokens, %d blocks, %s%s after %.2f s",
            on_one_line(request.request_id),
            request.tokens,
            request.blocks,
            end.value,
            f" by {on_one_line(reader, MAX_NAME)}" if reader else "",
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


def is_followed(*, log: bool) -> bool:
    """Return whether requests have lines in the log, so that ranks report what these need."""
    return log or logger.isEnabledFor(logging.DEBUG)
