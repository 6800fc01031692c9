"""A process that gets no more threads: loads fail, and never the endpoint."""

from __future__ import annotations

import pytest

from kvferry.core.errors import HandshakeError, KVFerryError
from tests.core.endpoint.engines import Engine, load
from tests.core.resource_limits import no_threads


@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("kvferry-handshake", None),
        ("kvferry-resolve", HandshakeError),
        ("kvferry-driver-call", None),
    ],
)
def test_a_load_that_gets_no_thread_fails_or_does_without_and_the_next_succeeds(
    decode: Engine, name: str, error_type: type[KVFerryError] | None
) -> None:
    with Engine("prefill", host="localhost") as prefill:
        with no_threads(name) as refused:
            error = load(prefill, decode, 1)
        assert refused
        if error_type is None:
            assert error is None
        else:
            assert isinstance(error, error_type)
            assert "ulimit" in str(error)
        assert load(prefill, decode, 2) is None
        assert decode.endpoint.healthy
