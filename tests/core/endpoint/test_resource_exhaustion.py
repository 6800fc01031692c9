"""A process that gets no more threads or file descriptors: loads fail, and never the endpoint."""

from __future__ import annotations

import errno
import os

import pytest

from kvferry.core.errors import HandshakeError, KVFerryError
from tests.core.endpoint.engines import Engine, load
from tests.core.resource_limits import no_threads


@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("kvferry-handshake", None),
        ("kvferry-resolve", HandshakeError),
        ("kvferry-side-channels", HandshakeError),
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


def test_a_load_that_gets_no_file_descriptor_fails_and_the_next_succeeds(
    prefill: Engine, decode: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_files(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd", no_files)
        error = load(prefill, decode, 1)
    assert isinstance(error, HandshakeError)
    assert "Too many open files; let this process have more files" in str(error)
    assert load(prefill, decode, 2) is None
    assert decode.endpoint.healthy
