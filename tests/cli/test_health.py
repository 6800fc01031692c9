"""``kvferry health``, as a probe calls it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from kvferry.cli.health import run
from kvferry.core.errors import HandshakeError, SecretError
from kvferry.core.handshake import HandshakeServer
from kvferry.core.security import Access, generate
from kvferry.core.wire import encode
from tests.core.messages import payload

PROBE, ENGINE = generate(), generate()
KEYS = {"secret_key": "env:PROBE", "server_key": ENGINE.public.hex()}
ENVIRONMENT = {"PROBE": PROBE.secret.hex()}


@pytest.fixture(params=["open", "encrypted"])
def serving(request: pytest.FixtureRequest) -> Iterator[tuple[HandshakeServer, dict[str, str]]]:
    """A side channel, and what the probe must say to be answered."""
    encrypted = request.param == "encrypted"
    access = Access(own=ENGINE, peers=frozenset({PROBE.public})) if encrypted else Access()
    with HandshakeServer(
        [encode(payload())],
        engine="prefill",
        incarnation=7,
        access=access,
        problems=lambda: PROBLEMS,
    ) as server:
        yield server, KEYS if encrypted else {}
    PROBLEMS.clear()


PROBLEMS: list[str] = []


def test_the_exit_status_says_it(
    serving: tuple[HandshakeServer, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    server, keys = serving
    probe = partial(run, server.host, server.port, timeout=20.0, environment=ENVIRONMENT, **keys)
    assert probe() == 0
    assert capsys.readouterr().out == "engine prefill is well\n"
    PROBLEMS.append("rank 1: it burns")
    assert probe() == 1
    assert capsys.readouterr().out == "engine prefill: rank 1: it burns\n"


def test_a_probe_without_an_answer_says_why(
    serving: tuple[HandshakeServer, dict[str, str]],
) -> None:
    server, _ = serving
    server.close()
    with pytest.raises(HandshakeError, match="nobody listens there"):
        run(server.host, server.port, timeout=20.0)


def test_a_key_that_is_none() -> None:
    with pytest.raises(SecretError):
        run("127.0.0.1", 1, timeout=1.0, server_key="abc")
