"""A process that may have no more threads or files: a load fails, and never the endpoint."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from kvferry.core.errors import ConnectError, HandshakeError, KVFerryError
from kvferry.core.lifecycle.holds import RequestId
from tests.core.endpoint.engines import Engine, engine
from tests.core.scarcity import no_threads


def load(prefill: Engine, decode: Engine, number: int) -> KVFerryError | None:
    """Why a load failed, if it did."""
    request = f"d-{number}"
    decode.pull(request, prefill.serve(f"p-{number}", [number], 4), [number])
    return decode.outcome(request).failed.get(RequestId(request))


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("kvferry-handshake", HandshakeError),
        ("kvferry-resolve", HandshakeError),
        ("kvferry-liveness", ConnectError),
        ("kvferry-driver-call", None),
    ],
)
def test_no_more_threads(name: str, outcome: type[KVFerryError] | None) -> None:
    with engine("prefill", host="localhost") as prefill, engine("decode") as decode:
        with no_threads(name) as refused:
            error = load(prefill, decode, 1)
        assert refused
        if outcome is None:
            assert error is None
        else:
            assert isinstance(error, outcome)
            assert "ulimit" in str(error)
        assert load(prefill, decode, 2) is None
        assert decode.ranks[0].endpoint.healthy


def test_no_more_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with engine("prefill") as prefill, engine("decode") as decode:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", scarce)
            error = load(prefill, decode, 1)
        assert isinstance(error, ConnectError)
        assert "Too many open files; let this process have more files" in str(error)
        assert load(prefill, decode, 2) is None
        assert decode.ranks[0].endpoint.healthy
