"""``kvferry check-config``: all problems of a configuration, and its JSON schema."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.check_config import InputError, print_schema, run
from kvferry.core.handshake import HandshakeServer
from kvferry.core.security import Access, generate
from kvferry.core.side_channel_messages import encode
from kvferry.integrations.vllm.config import Config, ConfigError, parse
from tests.cli.command import run_kvferry
from tests.core.messages import payload
from tests.own_host import OWN_HOST

jsonschema: Any = pytest.importorskip("jsonschema")  # vLLM brings it


def checked(
    capsys: pytest.CaptureFixture[str], given: object, *peers: str
) -> tuple[int, list[str], str]:
    """Check a configuration; return the exit status, the problems, and the last line."""
    status = run(json.dumps(given), peers)
    *lines, last = capsys.readouterr().out.splitlines()
    return status, [line for line in lines if line.startswith("- ")], last


def transfer(**changes: object) -> dict[str, Any]:
    """A ``--kv-transfer-config`` without problems, with some keys changed."""
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.integrations.vllm",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"driver": "loopback"},
    } | changes


def multi(*children: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    extra = {"connectors": list(children)}
    return {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"driver": "loopback", "driver_options": {"threads": 1}},
        transfer(),
        transfer(kv_connector_module_path=None, kv_load_failure_policy="recompute", kv_rank=0),
        multi(transfer(), {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}),
    ],
)
def test_accepted(capsys: pytest.CaptureFixture[str], given: object) -> None:
    status, problems, last = checked(capsys, given)
    assert (status, problems) == (0, [])
    assert "no problem on this host" in last


def test_all_problems_are_listed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    extra = {
        "drvier": "nixl",
        "backends": ["UCX"],
        "side_channel_port": "5600",
        "driver_options": {"thread": 1},
        "ticket_secrets": ["file:/missing"],
        "side_channel_host": "192.0.2.1",
    }
    given = transfer(
        kv_role="producer", kv_load_failure_policy="retry", role=1, kv_connector_extra_config=extra
    )
    status, problems, last = checked(capsys, given)
    assert status == 1
    assert last == "--kv-transfer-config: 9 problems"
    wanted = (
        "unknown key 'role' in --kv-transfer-config",
        "kv_role is 'producer': set one of kv_producer, kv_consumer, kv_both",
        "kv_load_failure_policy is 'retry': set one of recompute, fail",
        "unknown key 'drvier' in kv_connector_extra_config: did you mean 'driver'?",
        "'backends' in kv_connector_extra_config is NixlConnector's",
        "`$.side_channel_port`",
        "unknown field `thread`",
        "file:/missing cannot be read",
        "Set side_channel_host to an address of this host",
    )
    missing = [text for text in wanted if not any(text in problem for problem in problems)]
    assert missing == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (transfer(kv_connector="NixlConnector"), "'NixlConnector' does not select this connector"),
        (transfer(kv_connector_module_path="another"), "remove kv_connector_module_path"),
        (transfer(kv_role=None), "kv_role is missing"),
        (transfer(kv_connector_extra_config=[]), "is no JSON object"),
        (transfer(enable_permute_local_kv=True), "enable_permute_local_kv"),
        (transfer(kv_connector=None), "kv_connector is missing: set kv_connector to 'KVFerry"),
        (transfer(role=1), "unknown key 'role' in --kv-transfer-config: did you mean 'kv_role'?"),
        (transfer(kv_lease_duration=3), "belongs into kv_connector_extra_config: move it there"),
        (
            {"driver": "loopback", "kv_load_failure_policy": "recompute"},
            "'kv_load_failure_policy' belongs beside kv_connector, not into kv_connector_extra",
        ),
        (
            transfer(kv_connector_extra_config={"kv_role": "kv_both"}),
            "'kv_role' belongs beside kv_connector, not into kv_connector_extra_config: move it",
        ),
        (
            multi(transfer(kv_connector_extra_config={"driver": "unheard-of"})),
            "no driver 'unheard-of' is installed",
        ),
        ({"driver": "loopbak"}, "Did you mean 'loopback'? A driver comes with"),
        (
            multi(transfer(), {"kv_connector": "NixlConnector", "kv_role": "kv_both"}),
            "KVFerryConnector and NixlConnector under one MultiConnector",
        ),
    ],
)
def test_one_problem(capsys: pytest.CaptureFixture[str], given: object, words: str) -> None:
    status, problems, _ = checked(capsys, given)
    assert status == 1
    assert len(problems) == 1
    assert words in problems[0]


def test_port_that_is_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((OWN_HOST, 0)) as taken:
        port = taken.getsockname()[1]
        given = {"side_channel_host": OWN_HOST, "side_channel_port": port}
        status, problems, _ = checked(capsys, given)
    assert status == 1
    assert f"{OWN_HOST} port {port}: the port is in use" in problems[0]
    assert checked(capsys, given)[0] == 0


def test_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prefill.json"
    file.write_text(json.dumps(transfer()))
    assert run(str(file)) == 0
    assert "no problem" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("missing.json", "name a file with JSON"),
        ("{", "the argument is no JSON"),
        ("[]", "a JSON object is expected, not list"),
        ("list.json", "list.json: a JSON object is expected, not list"),
    ],
)
def test_input_that_is_no_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=why):
        run(text)


def test_every_key_and_secret_that_cannot_be_read_is_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {
        "ticket_secrets": ["file:/missing/t1", "file:/missing/t2"],
        "curve_secret_key": "file:/missing/own",
        "curve_peers": ["file:/missing/peers", "abc"],
        "allowed_peers": ["prefill"],
    }
    status, problems, _ = checked(capsys, given)
    assert status == 1
    wanted = (
        "ticket_secrets: file:/missing/t1 cannot be read (No such file",
        "ticket_secrets: file:/missing/t2 cannot be read (No such file",
        "curve_secret_key: file:/missing/own cannot be read (No such file",
        "curve_peers: file:/missing/peers cannot be read (No such file",
        "line 1 of curve_peers is no public key",
        "'prefill' in allowed_peers is no network",
    )
    assert len(problems) == len(wanted)
    missing = [text for text in wanted if not any(text in problem for problem in problems)]
    assert missing == []


@pytest.mark.parametrize("policy", ["recompute", "fail", None])
def test_turns_that_may_fail_are_a_note(
    capsys: pytest.CaptureFixture[str], policy: str | None
) -> None:
    given = transfer(
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"driver": "loopback", "bidirectional_kv_xfer": True},
    )
    found = notes(capsys, given)
    assert len(found) == (policy != "recompute")
    assert all("kv_load_failure_policy is 'fail', with bidirectional" in note for note in found)


def notes(capsys: pytest.CaptureFixture[str], given: object) -> list[str]:
    """The notes on a configuration."""
    run(json.dumps(given))
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("note: ")]


def test_default_driver_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ({}, transfer(kv_connector_extra_config={})):
        [note] = notes(capsys, given)
        assert "driver is not set: the default, 'loopback', is for engines of one host" in note
    assert notes(capsys, transfer()) == []


def test_notes_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no problem on this host." in checked(capsys, {"driver": "loopback"})[2]
    assert "no problem on this host but for 1 note above." in checked(capsys, {})[2]
    many = checked(capsys, {"verify_prompt": False})[2]
    assert "no problem on this host but for 2 notes above." in many


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({"driver": "nixl"}, True),
        (transfer(kv_connector_extra_config={"driver": "nixl"}), True),
        (multi(transfer(kv_connector_extra_config={"driver": "nixl"})), True),
        (transfer(kv_role="kv_consumer", kv_connector_extra_config={"driver": "nixl"}), False),
        ({"driver": "nixl", "side_channel_host": "127.0.0.1"}, False),
    ],
)
def test_default_side_channel_host_is_a_note(
    capsys: pytest.CaptureFixture[str], given: object, warned: bool
) -> None:
    found = notes(capsys, given)
    assert len(found) == warned
    assert all("only engines on this host can load from this one" in note for note in found)
    assert all("set side_channel_host to" in note for note in found)


def test_variables_of_nixlconnector_are_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.7")
    [note] = notes(capsys, {"driver": "loopback"})
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST (set side_channel_host instead)" in note


def test_open_access_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    [channel, tickets] = notes(capsys, {"driver": "loopback", "side_channel_host": "10.0.0.7"})
    assert "side channel at 10.0.0.7 is open" in channel
    assert "tickets are not signed" in tickets


def test_secret_that_others_can_read_is_a_note(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "ticket.secret"
    file.write_text("a secret of both engines")
    file.chmod(0o644)
    [note] = notes(capsys, {"driver": "loopback", "ticket_secrets": [f"file:{file}"]})
    assert note.startswith(f"note: file:{file} is open to others")


# Peers.

OWN, PEER, STRANGER = generate(), generate(), generate()
KEYED = {"curve_secret_key": "env:OWN", "allowed_peers": ["127.0.0.0/8"]}


@pytest.fixture
def keyed_peer() -> Iterator[str]:
    """The address of an encrypted side channel that admits ``OWN``."""
    access = Access(own=PEER, peers=frozenset({OWN.public}))
    with HandshakeServer(
        [encode(payload())], engine="prefill", incarnation=7, access=access
    ) as server:
        yield f"{server.host}:{server.port}"


def test_peer_that_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with HandshakeServer([encode(payload())], engine="prefill", incarnation=7) as server:
        peer = f"{server.host}:{server.port}"
        assert run("{}", [peer]) == 0
        assert f"peer {peer}: engine prefill answers" in capsys.readouterr().out
    status, [problem], _ = checked(capsys, {}, peer)
    assert status == 1
    assert f"--peer {peer}" in problem
    assert "nobody listens there" in problem


def test_peer_with_one_of_the_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, keyed_peer: str
) -> None:
    monkeypatch.setenv("OWN", OWN.secret.hex())
    peers = [STRANGER.public.hex(), PEER.public.hex()]
    assert checked(capsys, KEYED | {"curve_peers": peers}, keyed_peer)[0] == 0
    status, [problem], _ = checked(capsys, KEYED | {"curve_peers": peers[:1]}, keyed_peer)
    assert status == 1
    assert "does not have the secret key of the public key" in problem
    status, [problem], _ = checked(capsys, {}, keyed_peer)
    assert status == 1
    assert "set curve_secret_key and curve_peers here" in problem


# The schema.


def schema_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    print_schema()
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


def test_schema_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    schema = schema_of(capsys)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema["properties"]) == {field.name for field in fields(Config)}
    assert all(setting["description"] for setting in schema["properties"].values())
    assert schema["properties"]["kv_lease_duration"]["default"] == 30.0


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"driver": "nixl", "driver_options": {"backend": "UCX"}, "side_channel_port": 5600},
        {"allowed_peers": "anywhere"},
        {"allowed_peers": ["10.0.0.0/8"]},
        {"allowed_peers": "10.0.0.0/8"},
        {"drvier": "nixl"},
        {"side_channel_port": 65536},
        {"max_held_fraction": 0},
        {"verify_prompt": 1},
        {"curve_peers": [""]},
    ],
)
def test_schema_and_parser_agree(capsys: pytest.CaptureFixture[str], extra: dict[str, Any]) -> None:
    try:
        parse(extra)
        accepted = True
    except ConfigError:
        accepted = False
    validator = jsonschema.Draft202012Validator(schema_of(capsys))
    assert validator.is_valid(extra) == accepted


# The command.


def test_command() -> None:
    result = run_kvferry(dict(os.environ), "check-config", '{"drvier": 1}')
    assert result.returncode == 1
    assert "did you mean 'driver'" in result.stdout
    assert run_kvferry(dict(os.environ), "check-config", "{}").returncode == 0
    assert "properties" in run_kvferry(dict(os.environ), "check-config", "--schema").stdout
    assert run_kvferry(dict(os.environ), "check-config").returncode == 2


def test_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys\n"
        "from kvferry.cli.check_config import run\n"
        "run('{}')\n"
        "sys.exit(str({'torch', 'vllm'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert result.stderr.strip() == "set()"
