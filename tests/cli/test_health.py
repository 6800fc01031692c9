"""``kvferry health`` and ``kvferry revoke``, and the keys with which they ask an engine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvferry.cli.commands import app, health
from kvferry.cli.health import OPTIONS, parse, run
from kvferry.cli.keygen import run as keygen
from kvferry.cli.side_channel import keys_of
from kvferry.core.errors import AdmissionError, HandshakeError, SecretError
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
STRANGE = Access(own=ENGINE, peers=frozenset({OTHER.public}))
KEYS = {"curve_secret_key": "env:PROBE", "curve_peer": ENGINE.public.hex()}
KEY_OPTIONS = ["--curve-secret-key", "env:PROBE", "--curve-peer", ENGINE.public.hex()]
PROBLEMS: list[str] = []
ENVIRONMENT = {"OWN": PROBE.secret.hex(), "NONE": "abc", "TWO": f"{'ab' * 32}\n{'cd' * 32}\n"}


@pytest.fixture(autouse=True)
def probes_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE", PROBE.secret.hex())


@contextmanager
def side_channel(access: Access = KEYED, **options: object) -> Iterator[str]:
    """Yield the address of the side channel of an engine with ``PROBLEMS``."""
    with HandshakeServer(
        encoded(payload()),
        engine="prefill",
        incarnation=7,
        access=access,
        problems=lambda: PROBLEMS,
        **options,  # type: ignore[arg-type]
    ) as server:
        yield f"{server.host}:{server.port}"
    PROBLEMS.clear()


@pytest.mark.parametrize(("access", "keys"), [(OPEN, {}), (KEYED, KEYS)])
def test_exit_status_is_the_health(
    access: Access, keys: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with side_channel(access) as address:
        probe = partial(run, [address], timeout=60.0, **keys)
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
        (None, "give side_channel_port, not the port of vLLM's"),
    ],
)
def test_unreachable_engine_is_reported_without_tickets(host: str | None, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = [host, "1"] if host else [f"127.0.0.1:{other.getsockname()[1]}"]
        with pytest.raises(HandshakeError, match=said) as caught:
            run(address, timeout=60.0 if host else 0.2)
    assert "ticket" not in str(caught.value)


@pytest.mark.parametrize(
    ("access", "keys", "words"),
    [
        (KEYED, {}, "ask with --curve-secret-key and --curve-peer"),
        (OPEN, KEYS, "or ask without --curve-secret-key and --curve-peer"),
        (STRANGE, KEYS, "it refuses this engine's key"),
        (KEYED, KEYS | {"curve_peer": OTHER.public.hex()}, "it is known here .--curve-peer"),
    ],
)
def test_wrong_keys_are_reported_with_options(
    access: Access, keys: dict[str, str], words: str
) -> None:
    with side_channel(access) as address, pytest.raises(AdmissionError, match=words):
        run([address], timeout=60.0, **keys)


@pytest.mark.parametrize(("access", "keys"), [(OPEN, []), (KEYED, KEY_OPTIONS)])
def test_revoke_prints_the_number_of_tickets(
    access: Access, keys: list[str], command: Command
) -> None:
    with side_channel(access, revoke=lambda conversations: 2 - conversations) as address:
        asked = ["revoke", address, "--timeout", "60", *keys]
        said = "engine prefill: tickets{} that end with its next step: {}\n"
        assert command.run(*asked) == (0, said.format("", 2), "")
        some = command.run(*asked, "--conversations")
        assert some == (0, said.format(" of conversations", 1), "")
    with side_channel(access) as address:
        refused = command.run("revoke", address, "--timeout", "60", *keys)
    assert (refused.status, "does not end its holds by request" in refused.err) == (1, True)


# The command line, which the probe parses without typer.


def test_command_passes_the_options_on(command: Command) -> None:
    with side_channel() as address:
        asked = ["health", address, "--timeout", "60"]
        assert command.run(*asked, *KEY_OPTIONS) == (0, HEALTHY, "")
        by_typer = CliRunner().invoke(app, [*asked, *KEY_OPTIONS])
        assert (by_typer.exit_code, by_typer.output) == (0, HEALTHY)
    helped = command.run("health", "--help")
    assert (helped.status, "--curve-secret-key" in helped.out) == (0, True)
    for host in ("localhost", "h:0", "h port", "h 1 2", "h 0", "h 65536"):
        assert "' is not HOST:PORT" in command.run("health", *host.split()).err
    wrong = command.run("health", "localhost:1", "--timeout=0")
    assert (wrong.status, "Invalid value for '--timeout'" in wrong.err) == (2, True)


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
        *((f"h:1 --timeout{given}", None) for given in ("=nan", "=0", "", " x")),
        *((arguments, None) for arguments in ("", "--help", "h:1 --verbose")),
    ],
)
def test_arguments(arguments: str, parsed: dict[str, object] | None) -> None:
    assert parse(arguments.split()) == parsed


def test_probe_imports_little() -> None:
    """Modules are counted, not milliseconds, which depend on the machine and on its load."""
    with side_channel() as address:
        code = (
            f"import sys\nsys.argv = {['kvferry', 'health', address, *KEY_OPTIONS]}\n"
            "from kvferry.cli import run\n"
            f"print(run(), sorted({HEAVY} & set(sys.modules)))\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
        )
    assert result.stdout == f"{HEALTHY}0 []\n"


# Keys, as options name them.


def test_keys_from_environment_text_and_files(tmp_path: Path) -> None:
    assert keys_of("", "") == {"access": OPEN, "key": b""}
    keys = keys_of("env:OWN", ENGINE.public.hex(), ENVIRONMENT)
    assert (keys["access"].own, keys["key"]) == (PROBE, ENGINE.public)
    keys["access"].check_server(ENGINE.public)
    keygen(tmp_path, ["prefill", "probe"])
    keys = keys_of(f"file:{tmp_path}/probe.secret", f"file:{tmp_path}/prefill.public")
    assert keys["key"].hex() in (tmp_path / "prefill.public").read_text()


@pytest.mark.parametrize(
    ("secret_key", "peer", "why"),
    [
        ("env:OWN", "", "with both --curve-secret-key"),
        ("", ENGINE.public.hex(), "with both --curve-secret-key"),
        ("env:NONE", ENGINE.public.hex(), "env:NONE holds 3 characters"),
        ("env:NOBODY", "", "env:NOBODY is empty or not set"),
        ("env:OWN", "abc", "line 1 of --curve-peer is no public key"),
        ("env:OWN", "env:TWO", "--curve-peer names 2 keys"),
        (PROBE.secret.hex(), ENGINE.public.hex(), "and not where it is"),
    ],
    ids=map(str, range(7)),  # not by the keys, which are random
)
def test_invalid_keys_are_refused(secret_key: str, peer: str, why: str) -> None:
    with pytest.raises(SecretError, match=why) as caught:
        keys_of(secret_key, peer, ENVIRONMENT)
    assert PROBE.secret.hex() not in str(caught.value)
