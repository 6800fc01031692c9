"""``kvferry plan --from``: layouts from the side channels of running engines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvferry.cli.plan.engines import Engine, make_engine, parse
from kvferry.cli.plan.model import read_model
from kvferry.core.handshake import HandshakeServer
from kvferry.core.security import OPEN, Access, generate
from kvferry.core.side_channel_messages import encode
from tests.cli import hybrid_configs as configs
from tests.cli.plan_command import TINY, WINDOWS, make_plan, run_kvferry, write_config
from tests.core.messages import payload

Capture = pytest.CaptureFixture[str]

VLLM_NAMES = {".attn/": ".self_attn.attn/", ".mixer/": ".linear_attn/"}
PROBE, PREFILL, DECODE = generate(), generate(), generate()


def engine_of(config: str, settings: str) -> Engine:
    """Return an engine with vLLM's names of a multimodal model's layers."""
    made = make_engine(read_model(Path(config)), parse(settings, "--prefill"), 4096)
    return replace(
        made,
        ranks=tuple(
            replace(
                layout,
                fields=tuple(structs.replace(f, key=_vllm_name(f.key)) for f in layout.fields),
            )
            for layout in made.ranks
        ),
    )


def _vllm_name(key: str) -> str:
    for ours, theirs in VLLM_NAMES.items():
        key = key.replace(ours, theirs)
    return f"language_model.model.{key}"


@contextmanager
def running(
    engine: Engine,
    name: str = "prefill",
    *,
    access: Access = OPEN,
    agreement: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Serve an engine's layouts on a side channel, and yield the channel's ``HOST:PORT``."""
    ranks = [
        structs.replace(
            payload(rank, engine=name, agreement=agreement),
            layout=layout,
            coordinates=engine.coordinates[rank],
        )
        for rank, layout in enumerate(engine.ranks)
    ]
    with HandshakeServer(
        [encode(rank) for rank in ranks], engine=name, incarnation=7, access=access
    ) as server:
        yield f"{server.host}:{server.port}"


def plan_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    ran = run_kvferry(capsys, "plan", *arguments, "--json")
    assert ran.status == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TINY, id="attention"),
        pytest.param(WINDOWS, id="windows"),
        pytest.param(configs.QWEN3_5, id="states"),
        pytest.param(configs.FALCON_H1, id="attention and state in a layer"),
    ],
)
def test_running_engine_on_either_side_gives_the_computed_plan(
    tmp_path: Path, capsys: Capture, config: dict[str, Any]
) -> None:
    model = write_config(tmp_path, config)
    prefill, decode = "tp=2,layout=HND", "tp=1,block_size=32"
    computed = make_plan(capsys, [model], prefill, decode)
    with running(engine_of(model, prefill)) as first, running(engine_of(model, decode)) as second:
        for sides in (
            ("--from", first, "--decode", decode),
            ("--prefill", prefill, "--from", second),
            ("--from", first, "--from", second),
        ):
            found = plan_json(capsys, model, *sides)
            assert found["total"] == computed["total"]
            assert [rank["coordinates"] for rank in found["prefill"]] == [
                rank["coordinates"] for rank in computed["prefill"]
            ]


def test_two_running_engines_need_no_config(tmp_path: Path, capsys: Capture) -> None:
    engine = engine_of(write_config(tmp_path, TINY), "tp=2")
    with running(engine, "p-1") as first, running(engine, "d[/]-1") as second:
        ran = run_kvferry(capsys, "plan", "--from", first, "--from", second)
    assert f"prefill 2 ranks engine 'p-1' at {first}" in ran.words
    assert f"decode 2 ranks engine 'd[/]-1' at {second}" in ran.words
    assert "The side channel does not say which layers of decode have a sliding window" in ran.words
    assert "layers 0-3, heads 0-1" in ran.words


def test_written_layouts_of_a_running_engine_give_the_same_plan(
    tmp_path: Path, capsys: Capture
) -> None:
    engine = engine_of(write_config(tmp_path, TINY), "tp=2")
    with running(engine) as address:
        sides = "--from", address, "--from", address
        first = plan_json(capsys, *sides, f"--write-layouts={tmp_path}")
    again = make_plan(capsys, [], *(str(tmp_path / f"{n}.json") for n in ("prefill", "decode")))
    assert again["reads"] == first["reads"]


def test_engine_of_another_model_is_refused(tmp_path: Path, capsys: Capture) -> None:
    other = engine_of(write_config(tmp_path, TINY | {"num_hidden_layers": 3}), "tp=1")
    with running(other) as address:
        ran = run_kvferry(
            capsys, "plan", write_config(tmp_path, TINY), "--from", address, "--decode=tp=1"
        )
    assert ran.status == 1
    assert "field 'layers.3.attn/k'" in ran.err


def test_engines_that_refuse_each_other_are_reported(tmp_path: Path, capsys: Capture) -> None:
    engine = engine_of(write_config(tmp_path, TINY), "tp=1")
    with (
        running(engine, agreement={"model": "one"}) as first,
        running(engine, "decode", agreement={"model": "other"}) as second,
    ):
        found = plan_json(capsys, "--from", first, "--from", second)
    assert "model: 'other' here, 'one' there" in found["notes"][-1]


def test_refusal_is_reported_for_engines_whose_layouts_do_not_match(
    tmp_path: Path, capsys: Capture
) -> None:
    engine = engine_of(write_config(tmp_path, TINY), "tp=1")
    other = engine_of(write_config(tmp_path, TINY | {"num_hidden_layers": 3}), "tp=1")
    with (
        running(other, agreement={"model": "one"}) as first,
        running(engine, "decode", agreement={"model": "other"}) as second,
    ):
        ran = run_kvferry(capsys, "plan", "--from", first, "--from", second)
    assert ran.status == 1
    assert "layers.3.self_attn.attn/k" in ran.err
    assert "The handshake refuses this pair: " in ran.err
    assert "model: 'other' here, 'one' there" in ran.err


def test_engines_with_keys_are_asked_with_keys(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROBE", PROBE.secret.hex())
    engine = engine_of(write_config(tmp_path, TINY), "tp=1")
    peers = frozenset({PROBE.public})
    with (
        running(engine, access=Access(own=PREFILL, peers=peers)) as first,
        running(engine, "decode", access=Access(own=DECODE, peers=peers)) as second,
    ):
        sides = "--from", first, "--from", second
        keys = "--curve-peer", PREFILL.public.hex(), "--curve-peer", DECODE.public.hex()
        secret = "--curve-secret-key", "env:PROBE"
        assert plan_json(capsys, *sides, *secret, *keys)["total"]["copies"]
        for given, said in (
            ((), "ask with --curve-secret-key and --curve-peer"),
            (secret, "with both --curve-secret-key"),
            ((*secret, *keys[:2]), "--curve-peer is given 1 times and --from 2 times"),
            ((*secret, *keys[2:], *keys[:2]), "--curve-peer"),
        ):
            ran = run_kvferry(capsys, "plan", *sides, *given)
            assert (ran.status, said in ran.err) == (1, True), ran.err


def test_engine_that_cannot_be_reached_is_reported(tmp_path: Path, capsys: Capture) -> None:
    with running(engine_of(write_config(tmp_path, TINY), "tp=1")) as address:
        pass
    ran = run_kvferry(capsys, "plan", "--from", address, "--from", address)
    assert ran.status == 1
    assert f"kvferry: --from {address}: " in ran.err
    assert "nobody listens there" in ran.err
    assert "it is the engine's side_channel_host and side_channel_port" in ran.err


@pytest.mark.parametrize(
    "address",
    [
        "host",
        "host:",
        ":5600",
        "host:0",
        "host:65536",
        "host:five",
        "[::1]",
        "host:5 ",
        "::1",
        "fd00::5:5600",
    ],
)
def test_malformed_addresses_are_refused(capsys: Capture, address: str) -> None:
    ran = run_kvferry(capsys, "plan", "--from", address, "--from", "h:1")
    assert (ran.status, f"--from {address!r} is not HOST:PORT" in ran.err) == (1, True), ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the prefill engine is missing: give --prefill"),
        (["--prefill=tp=1"], "the decode engine is missing: give --decode"),
        (["--from=h:1"], "the decode engine is missing: give --decode"),
        (["--prefill=a.json", "--decode=b.json", "--from=h:1"], "--from is given 1 times"),
        (["--from=h:1"] * 3, "--from is given 3 times"),
        (
            ["--prefill=a.json", "--decode=b.json", "--curve-secret-key=env:KEY"],
            "are keys for --from",
        ),
    ],
)
def test_sides_that_are_missing_or_doubled_are_refused(
    capsys: Capture, arguments: list[str], said: str
) -> None:
    ran = run_kvferry(capsys, "plan", *arguments)
    assert (ran.status, said in ran.err) == (1, True), ran.err
