"""``kvferry check-config``: all problems of a configuration, and its JSON schema."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvferry.cli.check_config import InputError, run
from kvferry.core.security import Access, generate
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.integrations.vllm.config import Config, ConfigError, parse
from tests.cli.command import Command
from tests.core.messages import encoded, payload
from tests.own_host import OWN_HOST

jsonschema: Any = pytest.importorskip("jsonschema")  # vLLM brings it


class CheckResult(NamedTuple):
    """The problems and notes that the command listed, and the last line."""

    problems: list[str]
    notes: list[str]
    last: str


Checker = Callable[..., CheckResult]


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]) -> Checker:
    """A function that checks a configuration, and that peers answer."""

    def check(given: object, *peers: str) -> CheckResult:
        status = run(json.dumps(given), peers)
        *lines, last = capsys.readouterr().out.splitlines()
        problems, notes = (
            [line for line in lines if line.startswith(start)] for start in ("- ", "note: ")
        )
        assert status == bool(problems)
        return CheckResult(problems, notes, last)

    return check


def assert_lines_have(lines: list[str], words: Sequence[str]) -> None:
    """Check that there is one line for each of some words."""
    assert len(lines) == len(words), lines
    assert [each for each in words if not any(each in line for line in lines)] == [], lines


def transfer(extra: object = None, **changes: object) -> dict[str, Any]:
    """A ``--kv-transfer-config`` without problems, with some keys changed."""
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.integrations.vllm",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"driver": "loopback"} if extra is None else extra,
    } | changes


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    extra = {"connectors": list(children)}
    whole = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    return whole | {"kv_connector_extra_config": extra}


def test_all_problems_are_listed_at_once(checked: Checker) -> None:
    extra = {
        "drvier": "nixl",
        "backends": ["UCX"],
        "side_channel_port": "5600",
        "driver_options": {"thread": 1},
        "ticket_secrets": ["file:/missing/t1", "file:/missing/t2"],
        "curve_secret_key": "file:/missing/own",
        "curve_peers": ["file:/missing/peers", "abc"],
        "allowed_peers": ["prefill"],
        "side_channel_host": "192.0.2.1",
    }
    found = checked(transfer(extra, kv_role="producer", kv_load_failure_policy="retry", role=1))
    assert found.last == f"--kv-transfer-config: {len(found.problems)} problems"
    wanted = (
        "unknown key 'role' in --kv-transfer-config: did you mean 'kv_role'?",
        "kv_role is 'producer': set one of kv_producer, kv_consumer, kv_both",
        "kv_load_failure_policy is 'retry': set one of recompute, fail",
        "unknown key 'drvier' in kv_connector_extra_config: did you mean 'driver'?",
        "'backends' in kv_connector_extra_config is NixlConnector's",
        "`$.side_channel_port`",
        "unknown field `thread`",
        "ticket_secrets: file:/missing/t1 cannot be read (No such file",
        "curve_secret_key: file:/missing/own cannot be read (No such file",
        "line 1 of curve_peers is no public key",
        "'prefill' in allowed_peers is no network",
        "Set side_channel_host to an address of this host",
    )
    assert_lines_have(found.problems, wanted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (transfer(kv_connector="NixlConnector"), "'NixlConnector' does not select this connector"),
        (transfer(kv_connector_module_path="another"), "remove kv_connector_module_path"),
        (transfer(kv_role=None), "kv_role is missing"),
        (transfer([]), "is no JSON object"),
        (transfer(kv_connector=None), "kv_connector is missing: set kv_connector to 'KVFerry"),
        (transfer(kv_lease_duration=3), "belongs into kv_connector_extra_config: move it there"),
        (
            {"driver": "loopback", "kv_load_failure_policy": "recompute"},
            "'kv_load_failure_policy' belongs beside kv_connector, not into kv_connector_extra",
        ),
        (multi(transfer({"driver": "loopbak"})), "Did you mean 'loopback'? A driver comes with"),
        (
            multi(transfer(), {"kv_connector": "NixlConnector", "kv_role": "kv_both"}),
            "KVFerryConnector and NixlConnector under one MultiConnector",
        ),
    ],
)
def test_one_problem(checked: Checker, given: object, words: str) -> None:
    assert_lines_have(checked(given).problems, [words])


def test_port_that_is_in_use(checked: Checker) -> None:
    with socket.create_server((OWN_HOST, 0)) as taken:
        port = taken.getsockname()[1]
        given = {"side_channel_host": OWN_HOST, "side_channel_port": port}
        said = f"{OWN_HOST} port {port}: the port is in use"
        assert_lines_have(checked(given).problems, [said])
    assert checked(given).problems == []


def test_input_that_is_no_object() -> None:
    for text, why in (
        ("missing.json", "name a file with JSON"),
        ("{", "the argument is no JSON"),
        ("[]", "a JSON object is expected, not list"),
    ):
        with pytest.raises(InputError, match=why):
            run(text)


# Notes.

NO_DRIVER = "driver is not set: the default, 'loopback', is for engines of one host"
ONE_HOST = "only engines on this host can load from this one"
POLICY = "kv_load_failure_policy is 'fail', with bidirectional"
NIXL = {"driver": "nixl"}
TURNS = transfer({"driver": "loopback", "bidirectional_kv_xfer": True}, kv_role="kv_both")
OPEN_HOST = {"driver": "loopback", "side_channel_host": "10.0.0.7"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (transfer(kv_connector_module_path=None, kv_rank=0), []),
        ({"driver": "loopback", "driver_options": {"threads": 1}}, []),
        (multi(transfer(), {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}), []),
        ({}, [NO_DRIVER]),
        (transfer({}), [NO_DRIVER]),
        (NIXL, [ONE_HOST]),
        (multi(transfer(NIXL)), [ONE_HOST]),
        (transfer(NIXL, kv_role="kv_consumer"), []),
        (NIXL | {"side_channel_host": "127.0.0.1"}, []),
        (OPEN_HOST, ["side channel at 10.0.0.7 is open", "tickets are not signed"]),
        (TURNS | {"kv_load_failure_policy": "recompute"}, []),
        (TURNS, [POLICY]),
    ],
)
def test_notes_are_listed_and_counted(checked: Checker, given: object, words: list[str]) -> None:
    found = checked(given)
    assert_lines_have(found.notes, words)
    assert all("set side_channel_host to" in note for note in found.notes if ONE_HOST in note)
    counted = ["", " but for 1 note above", " but for 2 notes above"][len(words)]
    assert found.problems == [] or given is OPEN_HOST
    assert f"no problem on this host{counted}." in found.last or given is OPEN_HOST


# Peers.


def test_peer_with_one_of_the_keys(
    checked: Checker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, engine, stranger = generate(), generate(), generate()
    monkeypatch.setenv("OWN", own.secret.hex())
    access = Access(own=engine, peers=frozenset({own.public}))
    keyed = {"curve_secret_key": "env:OWN", "allowed_peers": ["127.0.0.0/8"]}
    peers = [stranger.public.hex(), engine.public.hex()]
    with HandshakeServer(
        encoded(payload()), engine="prefill", incarnation=7, access=access
    ) as server:
        peer = f"{server.host}:{server.port}"
        right = keyed | {"curve_peers": peers}
        assert run(json.dumps(right), [peer]) == 0
        assert f"peer {peer}: engine prefill answers" in capsys.readouterr().out
        for given, words in (
            (keyed | {"curve_peers": peers[:1]}, ["does not have the secret key of the public"]),
            ({}, ["set curve_secret_key and curve_peers here"]),
        ):
            assert_lines_have(checked(given, peer).problems, words)
    [problem] = checked(right, peer).problems
    assert f"--peer {peer}" in problem
    assert "nobody listens there" in problem


# The schema.


def test_schema_describes_every_setting_and_agrees_with_the_parser(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("", schema=True)
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == {field.name for field in fields(Config)}
    assert all(setting["description"] for setting in schema["properties"].values())
    assert schema["properties"]["kv_lease_duration"]["default"] == 30.0
    nixl = {"driver": "nixl", "driver_options": {"backend": "UCX"}, "side_channel_port": 1}
    for extra in ({}, nixl, {"allowed_peers": "anywhere"}, {"allowed_peers": ["10.0.0.0/8"]}):
        parse(extra)
        assert jsonschema.Draft202012Validator(schema).is_valid(extra)
    for key, value in {
        "allowed_peers": "10.0.0.0/8",
        "drvier": "nixl",
        "side_channel_port": 65536,
        "max_held_fraction": 0,
        "verify_prompt": 1,
        "curve_peers": [""],
    }.items():
        with pytest.raises(ConfigError):
            parse({key: value})
        assert not jsonschema.Draft202012Validator(schema).is_valid({key: value})


# The command.


def test_command(command: Command, tmp_path: Path) -> None:
    wrong = command.run("check-config", '{"drvier": 1}')
    assert (wrong.status, "did you mean 'driver'" in wrong.out) == (1, True)
    file = tmp_path / "prefill.json"
    file.write_text(json.dumps(transfer()))
    right = command.run("check-config", str(file))
    assert (right.status, "no problem" in right.out) == (0, True)
    assert "properties" in command.run("check-config", "--schema").out
    assert command.run("check-config").status == 2
