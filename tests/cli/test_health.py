"""``kvferry health`` as a probe calls it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from typer.testing import CliRunner

from kvferry.cli.commands import app, health
from kvferry.cli.health import OPTIONS, parse, run
from kvferry.core.errors import AdmissionError, HandshakeError
from kvferry.core.security import Access, generate
from kvferry.core.side_channel import HandshakeServer
from kvferry.core.side_channel_messages import encode
from tests.cli.command import Command
from tests.core.messages import payload

HEAVY = {
    "argparse",
    "cryptography",
    "kvferry.core.layout",
    "kvferry.core.messages",
    "numpy",
    "rich",
    "stevedore",
    "typer",
}

PROBE, ENGINE = generate(), generate()
KEYS = {"secret_key": "env:PROBE", "peer": ENGINE.public.hex()}


@pytest.fixture(autouse=True)
def probes_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE", PROBE.secret.hex())


PROBLEMS: list[str] = []
HEALTHY = (
    "engine prefill is well: its driver and its side channel are up, and nothing is quarantined\n"
)
OPEN = Access()
KEYED = Access(own=ENGINE, peers=frozenset({PROBE.public}))


@contextmanager
def side_channel(access: Access) -> Iterator[HandshakeServer]:
    """Yield the side channel of an engine with ``PROBLEMS``."""
    with HandshakeServer(
        [encode(payload())],
        engine="prefill",
        incarnation=7,
        access=access,
        problems=lambda: PROBLEMS,
    ) as server:
        yield server
    PROBLEMS.clear()


@pytest.mark.parametrize(("access", "keys"), [(OPEN, {}), (KEYED, KEYS)])
def test_exit_status_is_the_health(
    access: Access, keys: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with side_channel(access) as server:
        probe = partial(run, server.host, server.port, timeout=60.0, **keys)
        assert probe() == 0
        assert capsys.readouterr().out == HEALTHY
        PROBLEMS.append("rank 1: it burns")
        assert probe() == 1
        assert capsys.readouterr().out == "engine prefill: rank 1: it burns\n"
    with pytest.raises(HandshakeError, match="nobody listens there"):
        probe()


def test_unreachable_engine_is_reported_without_tickets_and_settings() -> None:
    with pytest.raises(HandshakeError) as caught:
        run("127.0.0.1", 1, timeout=60.0)
    assert "127.0.0.1 is a loopback address: it means this host" in str(caught.value)
    assert "ticket" not in str(caught.value)
    with pytest.raises(HandshakeError, match="correct the host, or ask from a host that"):
        run("no-such-host.invalid", 5600, timeout=60.0)


def test_another_listener_is_reported_with_the_port_to_give() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(HandshakeError, match="Give side_channel_port, not the port of vLLM's"),
    ):
        run("127.0.0.1", other.getsockname()[1], timeout=0.2)


OTHER = generate()


@pytest.mark.parametrize(
    ("access", "keys", "words"),
    [
        (KEYED, {}, "ask with --curve-secret-key and --curve-peer"),
        (OPEN, KEYS, "or ask without --curve-secret-key and --curve-peer"),
        (
            Access(own=ENGINE, peers=frozenset({OTHER.public})),
            KEYS,
            "it refuses the key of --curve-secret-key",
        ),
        (KEYED, KEYS | {"peer": OTHER.public.hex()}, "by which it is known to --curve-peer"),
    ],
)
def test_wrong_keys_are_reported_with_options(
    access: Access, keys: dict[str, str], words: str
) -> None:
    with side_channel(access) as server, pytest.raises(AdmissionError, match=words):
        run(server.host, server.port, timeout=60.0, **keys)


@pytest.fixture
def keyed_server() -> Iterator[HandshakeServer]:
    """An encrypted side channel that admits the probe."""
    with side_channel(KEYED) as server:
        yield server


def test_options_have_the_names_of_the_settings(
    command: Command, keyed_server: HandshakeServer
) -> None:
    keys = ["--curve-secret-key", "env:PROBE", "--curve-peer", ENGINE.public.hex()]
    asked = ["health", f"{keyed_server.host}:{keyed_server.port}", "--timeout", "60"]
    result = CliRunner().invoke(app, [*asked, *keys])
    assert (result.exit_code, result.output) == (0, HEALTHY)
    assert command.run(*asked, *keys) == (0, HEALTHY, "")
    refused = command.run(*asked)
    assert (refused.status, refused.out) == (1, "")
    assert "encrypted: ask with --curve-secret-key and --curve-peer" in refused.err


def test_probe_and_typer_have_the_same_options() -> None:
    import typer

    [command] = [each for each in app.registered_commands if each.callback is health]
    group = typer.Typer(add_completion=False)
    group.registered_commands.append(command)
    options = [option for each in typer.main.get_command(group).params for option in each.opts]
    assert sorted(option for option in options if option.startswith("--")) == sorted(OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        (
            ["::1", "5600"],
            {"host": "::1", "port": 5600, "timeout": 5.0, "secret_key": "", "peer": ""},
        ),
        (
            ["--timeout=2", "--curve-peer", "aa", "[::1]:1", "--curve-secret-key=file:a=b"],
            {"host": "::1", "port": 1, "timeout": 2.0, "secret_key": "file:a=b", "peer": "aa"},
        ),
        (["h"], None),
        (["h:0"], None),
        (["h", "port"], None),
        (["h", "1", "2"], None),
        (["h", "0"], None),
        (["h", "65536"], None),
        (["h:1", "--timeout=nan"], None),
        (["h:1", "--timeout=0"], None),
        (["h:1", "--timeout"], None),
        (["h:1", "--timeout", "soon"], None),
        (["h:1", "--verbose"], None),
        (["--help"], None),
    ],
)
def test_arguments(arguments: list[str], parsed: object) -> None:
    assert parse(arguments) == parsed


def test_help_and_usage_are_those_of_typer(command: Command) -> None:
    helped = command.run("health", "--help")
    assert (helped.status, "--curve-secret-key" in helped.out) == (0, True)
    assert "'localhost' is not HOST:PORT" in command.run("health", "localhost").err
    wrong = command.run("health", "localhost:1", "--timeout=0")
    assert (wrong.status, "Invalid value for '--timeout'" in wrong.err) == (2, True)


def test_probe_imports_little(keyed_server: HandshakeServer) -> None:
    """Modules are counted, not milliseconds, which depend on the machine and on its load."""
    keys = ["--curve-secret-key", "env:PROBE", "--curve-peer", ENGINE.public.hex()]
    arguments = ["kvferry", "health", f"{keyed_server.host}:{keyed_server.port}", *keys]
    code = (
        "import sys\n"
        f"sys.argv = {arguments}\n"
        "from kvferry.cli import run\n"
        f"print(run(), sorted({HEAVY} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert result.stdout == f"{HEALTHY}0 []\n"
