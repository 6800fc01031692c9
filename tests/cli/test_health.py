"""``kvferry health`` as a probe calls it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from typer.testing import CliRunner

from kvferry.cli import app
from kvferry.cli.health import run
from kvferry.cli.keys import NONE, Keys, keys_of
from kvferry.core.errors import AdmissionError, HandshakeError
from kvferry.core.handshake import HandshakeServer
from kvferry.core.messages import encode
from kvferry.core.security import Access, KeyPair, generate
from tests.core.messages import payload

PROBE, ENGINE = generate(), generate()
KEYS = keys_of("env:PROBE", ENGINE.public.hex(), {"PROBE": PROBE.secret.hex()})


@pytest.fixture(params=["open", "encrypted"])
def server_and_keys(request: pytest.FixtureRequest) -> Iterator[tuple[HandshakeServer, Keys]]:
    """A side channel, and the keys with which it answers a probe."""
    encrypted = request.param == "encrypted"
    access = Access(own=ENGINE, peers=frozenset({PROBE.public})) if encrypted else Access()
    with HandshakeServer(
        [encode(payload())],
        engine="prefill",
        incarnation=7,
        access=access,
        problems=lambda: PROBLEMS,
    ) as server:
        yield server, KEYS if encrypted else NONE
    PROBLEMS.clear()


PROBLEMS: list[str] = []
HEALTHY = (
    "engine prefill is well: its driver and its side channel are up, and nothing is quarantined\n"
)


def test_exit_status_is_the_health(
    server_and_keys: tuple[HandshakeServer, Keys], capsys: pytest.CaptureFixture[str]
) -> None:
    server, keys = server_and_keys
    probe = partial(run, server.host, server.port, timeout=20.0, keys=keys)
    assert probe() == 0
    assert capsys.readouterr().out == HEALTHY
    PROBLEMS.append("rank 1: it burns")
    assert probe() == 1
    assert capsys.readouterr().out == "engine prefill: rank 1: it burns\n"


def test_missing_answer_is_reported_with_reason(
    server_and_keys: tuple[HandshakeServer, Keys],
) -> None:
    server, _ = server_and_keys
    server.close()
    with pytest.raises(HandshakeError, match="nobody listens there"):
        run(server.host, server.port, timeout=20.0)


def test_encrypted_engine_refuses_probe_without_keys() -> None:
    access = Access(own=ENGINE, peers=frozenset({PROBE.public}))
    with (
        HandshakeServer(
            [encode(payload())], engine="prefill", incarnation=7, access=access
        ) as server,
        pytest.raises(AdmissionError, match="ask with --curve-secret-key and --curve-peer"),
    ):
        run(server.host, server.port, timeout=20.0)


OTHER = generate()


@pytest.mark.parametrize(
    ("access", "peer", "words"),
    [
        (Access(), ENGINE, "or ask without --curve-secret-key and --curve-peer"),
        (
            Access(own=ENGINE, peers=frozenset({OTHER.public})),
            ENGINE,
            "it refuses the key of --curve-secret-key",
        ),
        (
            Access(own=ENGINE, peers=frozenset({PROBE.public})),
            OTHER,
            "by which it is known to --curve-peer",
        ),
    ],
)
def test_wrong_keys_are_reported_with_options(access: Access, peer: KeyPair, words: str) -> None:
    keys = keys_of("env:PROBE", peer.public.hex(), {"PROBE": PROBE.secret.hex()})
    with (
        HandshakeServer(
            [encode(payload())], engine="prefill", incarnation=7, access=access
        ) as server,
        pytest.raises(AdmissionError) as caught,
    ):
        run(server.host, server.port, timeout=20.0, keys=keys)
    assert words in str(caught.value)


def test_options_have_the_names_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PROBE", PROBE.secret.hex())
    access = Access(own=ENGINE, peers=frozenset({PROBE.public}))
    with HandshakeServer(
        [encode(payload())], engine="prefill", incarnation=7, access=access
    ) as server:
        keys = ["--curve-secret-key", "env:PROBE", "--curve-peer", ENGINE.public.hex()]
        asked = ["health", server.host, str(server.port), "--timeout", "20", *keys]
        result = CliRunner().invoke(app, asked)
    assert (result.exit_code, result.output) == (0, HEALTHY)
