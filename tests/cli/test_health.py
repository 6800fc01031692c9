"""``kvferry health`` as a probe calls it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import typer
from typer.testing import CliRunner

from kvferry.cli.commands import app, health
from kvferry.cli.health import OPTIONS, parse, run
from kvferry.core.errors import AdmissionError, HandshakeError
from kvferry.core.security import OPEN, Access, generate
from kvferry.core.side_channel.server import HandshakeServer
from tests.cli.command import Command
from tests.core.messages import encoded, payload

HEAVY = {
    *("argparse", "cryptography", "numpy", "rich", "stevedore", "typer"),
    *("kvferry.core.layout", "kvferry.core.messages"),
}
HEALTHY = (
    "engine prefill is well: its driver and its side channel are up, and nothing is quarantined\n"
)
PROBE, ENGINE, OTHER = generate(), generate(), generate()
KEYED = Access(own=ENGINE, peers=frozenset({PROBE.public}))
KEYS = {"curve_secret_key": "env:PROBE", "curve_peer": ENGINE.public.hex()}
KEY_OPTIONS = ["--curve-secret-key", "env:PROBE", "--curve-peer", ENGINE.public.hex()]
PROBLEMS: list[str] = []


@pytest.fixture(autouse=True)
def probes_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE", PROBE.secret.hex())


@contextmanager
def side_channel(access: Access = KEYED) -> Iterator[HandshakeServer]:
    """Yield the side channel of an engine with ``PROBLEMS``."""
    with HandshakeServer(
        encoded(payload()),
        engine="prefill",
        incarnation=7,
        access=access,
        problems=lambda: PROBLEMS,
    ) as server:
        yield server
    PROBLEMS.clear()


def address(server: HandshakeServer) -> str:
    return f"{server.host}:{server.port}"


@pytest.mark.parametrize(("access", "keys"), [(OPEN, {}), (KEYED, KEYS)])
def test_exit_status_is_the_health(
    access: Access, keys: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with side_channel(access) as server:
        probe = partial(run, [address(server)], timeout=60.0, **keys)
        assert (probe(), capsys.readouterr().out) == (0, HEALTHY)
        PROBLEMS.append("rank 1: it burns")
        assert (probe(), capsys.readouterr().out) == (1, "engine prefill: rank 1: it burns\n")
    with pytest.raises(HandshakeError, match="nobody listens there"):
        probe()


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", "127.0.0.1 is a loopback address: it means the host that asks"),
        ("no-such-host.invalid", "set side_channel_host to an IP address"),
    ],
)
def test_unreachable_engine_is_reported_without_tickets(host: str, said: str) -> None:
    with pytest.raises(HandshakeError, match=said) as caught:
        run([host, "1"], timeout=60.0)
    assert "ticket" not in str(caught.value)


def test_another_listener_is_reported_with_the_port_to_give() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(HandshakeError, match="give side_channel_port, not the port of vLLM's"),
    ):
        run([f"127.0.0.1:{other.getsockname()[1]}"], timeout=0.2)


@pytest.mark.parametrize(
    ("access", "keys", "words"),
    [
        (KEYED, {}, "ask with --curve-secret-key and --curve-peer"),
        (OPEN, KEYS, "or ask without --curve-secret-key and --curve-peer"),
        (
            *(Access(own=ENGINE, peers=frozenset({OTHER.public})), KEYS),
            "it refuses this engine's key",
        ),
        (
            KEYED,
            KEYS | {"curve_peer": OTHER.public.hex()},
            "by which it is known here .--curve-peer",
        ),
    ],
)
def test_wrong_keys_are_reported_with_options(
    access: Access, keys: dict[str, str], words: str
) -> None:
    with side_channel(access) as server, pytest.raises(AdmissionError, match=words):
        run([address(server)], timeout=60.0, **keys)


def test_command_passes_the_options_on(command: Command) -> None:
    with side_channel() as server:
        asked = ["health", f"{server.host}:{server.port}", "--timeout", "60"]
        assert command.run(*asked, *KEY_OPTIONS) == (0, HEALTHY, "")
        by_typer = CliRunner().invoke(app, [*asked, *KEY_OPTIONS])
        assert (by_typer.exit_code, by_typer.output) == (0, HEALTHY)
        refused = command.run(*asked)
    assert (refused.status, refused.out) == (1, "")
    assert "or ask with --curve-secret-key and --curve-peer" in refused.err


def test_probe_and_typer_have_the_same_options() -> None:
    [command] = [each for each in app.registered_commands if each.callback is health]
    group = typer.Typer(add_completion=False)
    group.registered_commands.append(command)
    options = [option for each in typer.main.get_command(group).params for option in each.opts]
    assert sorted(option for option in options if option.startswith("--")) == sorted(OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ("::1 5600", {"address": ["::1", "5600"], "timeout": 5.0}),
        (
            "--timeout=2 --curve-peer aa [::1]:1 --curve-secret-key=file:a=b",
            {"timeout": 2.0, "curve_peer": "aa", "address": ["[::1]:1"]}
            | {"curve_secret_key": "file:a=b"},
        ),
        ("", None),
        ("--help", None),
        *(
            (f"h:1 {option}", None)
            for option in ("--timeout=nan", "--timeout=0", "--timeout", "--timeout x", "--verbose")
        ),
    ],
)
def test_arguments(arguments: str, parsed: dict[str, object] | None) -> None:
    assert parse(arguments.split()) == parsed


def test_help_and_usage_are_those_of_typer(command: Command) -> None:
    helped = command.run("health", "--help")
    assert (helped.status, "--curve-secret-key" in helped.out) == (0, True)
    for host in ("localhost", "h:0", "h port", "h 1 2", "h 0", "h 65536"):
        assert "' is not HOST:PORT" in command.run("health", *host.split()).err
    wrong = command.run("health", "localhost:1", "--timeout=0")
    assert (wrong.status, "Invalid value for '--timeout'" in wrong.err) == (2, True)


def test_probe_imports_little() -> None:
    """Modules are counted, not milliseconds, which depend on the machine and on its load."""
    with side_channel() as server:
        arguments = ["kvferry", "health", f"{server.host}:{server.port}", *KEY_OPTIONS]
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
