"""Causes of errors, and one-line messages with a remedy."""

from __future__ import annotations

from kvferry.core import errors
from kvferry.core.error_causes import on_one_line, with_remedy
from kvferry.core.errors import (
    NOT_THE_TICKET,
    Cause,
    ConnectError,
    KVFerryError,
    RefusedError,
    StaleError,
    TicketError,
    TransferCancelledError,
    TransportUsageError,
)

NOT_OF_A_LOAD = {"KVFerryError", "LayoutError", "WireError", "SecretError", "DriverError"}


def test_every_error_that_fails_a_load_has_a_cause() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, KVFerryError)
    ]
    assert {kind.__name__ for kind in kinds if kind.cause is Cause.OTHER} == NOT_OF_A_LOAD
    assert {kind.cause for kind in kinds} == set(Cause)
    some = StaleError, RefusedError, ConnectError, TransferCancelledError, TransportUsageError
    causes = ["stale", "unreachable", "unreachable", "given_up", "transport"]
    assert [kind.cause for kind in some] == causes


def test_text_of_a_peer_stays_on_one_line() -> None:
    """A ticket may name any engine."""
    hostile = "prefill\n2026-01-01 ERROR \x1b[2J all is lost\u2028\x00"
    assert on_one_line(hostile) == "prefill 2026-01-01 ERROR ?[2J all is lost ?"
    assert len(on_one_line("x" * 100_000)) == 4096
    assert "\n" not in with_remedy(TicketError(hostile))


def test_a_remedy_is_added_unless_the_error_has_one() -> None:
    assert with_remedy(TicketError("it is torn")).startswith("it is torn (prefill again")
    assert with_remedy(StaleError("gone: prefill again")) == "gone: prefill again"
    for reason in NOT_THE_TICKET:
        assert with_remedy(TicketError("do this", reason=reason)) == "do this"
