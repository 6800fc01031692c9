"""``kvferry health``, as a probe calls it."""

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
def serving(request: pytest.FixtureRequest) -> Iterator[tuple[HandshakeServer, Keys]]:
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
        yield server, KEYS if encrypted else NONE
    PROBLEMS.clear()


PROBLEMS: list[str] = []
WELL = (
    "engine prefill is well: its driver and its side channel are up, and nothing is quarantined\n"
)


def test_the_exit_status_says_it(
    serving: tuple[HandshakeServer, Keys], capsys: pytest.CaptureFixture[str]
) -> None:
    server, keys = serving
    probe = partial(run, server.host, server.port, timeout=20.0, keys=keys)
    assert probe() == 0
    assert capsys.readouterr().out == WELL
    PROBLEMS.append("rank 1: it burns")
    assert probe() == 1
    assert capsys.readouterr().out == "engine prefill: rank 1: it burns\n"


def test_a_probe_without_an_answer_says_why(
    serving: tuple[HandshakeServer, Keys],
) -> None:
    server, _ = serving
    server.close()
    with pytest.raises(HandshakeError, match="nobody listens there"):
        run(server.host, server.port, timeout=20.0)


def test_an_engine_with_keys_answers_nobody_without() -> None:
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
def test_what_is_wrong_with_keys_names_the_flags(access: Access, peer: KeyPair, words: str) -> None:
    keys = keys_of("env:PROBE", peer.public.hex(), {"PROBE": PROBE.secret.hex()})
    with (
        HandshakeServer(
            [encode(payload())], engine="prefill", incarnation=7, access=access
        ) as server,
        pytest.raises(AdmissionError) as caught,
    ):
        run(server.host, server.port, timeout=20.0, keys=keys)
    assert words in str(caught.value)


def test_the_options_are_called_as_an_engine_s_settings(
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
    assert (result.exit_code, result.output) == (0, WELL)
