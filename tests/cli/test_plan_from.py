"""``kvferry plan --from``: layouts from the side channels of running engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from kvferry.cli.plan.engines import Engine, make_engine, parse
from kvferry.cli.plan.model import read_model
from kvferry.core.security import OPEN, Access, generate
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel_messages import encode
from tests.cli import hybrid_configs as configs
from tests.cli.plan_command import TINY, WINDOWS, Config, PlanCommand, write_config
from tests.core.messages import payload

VLLM_NAMES = {
    '"layers.': '"language_model.model.layers.',
    ".attn/": ".self_attn.attn/",
    ".mixer/": ".linear_attn/",
}
PROBE, PREFILL, DECODE = generate(), generate(), generate()


def engine_of(folder: Path, config: Config, settings: str = "tp=1") -> Engine:
    """Return an engine with vLLM's names of a multimodal model's layers."""
    model = read_model(Path(write_config(folder, config)))
    made = msgspec.json.encode(make_engine(model, parse(settings), 4096)).decode()
    for ours, theirs in VLLM_NAMES.items():
        made = made.replace(ours, theirs)
    return msgspec.json.decode(made, type=Engine)


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


def both(first: str, second: str) -> tuple[str, ...]:
    """The arguments for two running engines, without any of an engine that does not run."""
    return "", "", "--from", first, "--from", second


@pytest.mark.parametrize("config", [WINDOWS, configs.FALCON_H1], ids=["windows", "states"])
def test_running_engine_on_either_side_gives_the_computed_plan(
    plan: PlanCommand, config: Config
) -> None:
    prefill, decode = "tp=2,layout=HND", "tp=1,block_size=32"
    computed = plan.json(config, prefill, decode)
    one, other = (engine_of(plan.folder, config, side) for side in (prefill, decode))
    with running(one) as first, running(other) as second:
        asked = ("", decode, "--from", first), (prefill, "", "--from", second), both(first, second)
        for sides in asked:
            found = plan.json(config, *sides)
            assert found["total"] == computed["total"]
            key = found["reads"][0]["fields"][0]["keys"][0]
            assert key.startswith("language_model.model.layers.")  # vLLM's name
            for name in ("prefill", "decode"):
                placed = [[rank["coordinates"] for rank in it[name]] for it in (found, computed)]
                assert placed[0] == placed[1]


def test_two_running_engines_need_no_config(plan: PlanCommand) -> None:
    engine = engine_of(plan.folder, TINY, "tp=2")
    with running(engine, "p-1") as first, running(engine, "d[/]-1") as second:
        said = plan.text(None, *both(first, second))
    for part in (
        f"prefill 2 ranks engine 'p-1' at {first}",
        f"decode 2 ranks engine 'd[/]-1' at {second}",
        "layers 0-3, 2 heads",
    ):
        assert part in said


def test_engines_that_refuse_each_other_are_reported(plan: PlanCommand) -> None:
    engine = engine_of(plan.folder, TINY)
    with (
        running(engine, agreement={"model": "one"}) as first,
        running(engine, "decode", agreement={"model": "other"}) as second,
    ):
        said = plan.refusal(None, *both(first, second))
    assert said.startswith("kvferry: engine 'decode' (rank 0) must not read from engine 'prefill'")
    assert "model: 'other' here, 'one' there" in said


def test_engines_with_keys_are_asked_with_keys(
    plan: PlanCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROBE", PROBE.secret.hex())
    engine, peers = engine_of(plan.folder, TINY), frozenset({PROBE.public})
    with (
        running(engine, access=Access(own=PREFILL, peers=peers)) as first,
        running(engine, "decode", access=Access(own=DECODE, peers=peers)) as second,
    ):
        sides = both(first, second)
        keys = "--curve-peer", PREFILL.public.hex(), "--curve-peer", DECODE.public.hex()
        secret = "--curve-secret-key", "env:PROBE"
        assert plan.json(None, *sides, *secret, *keys)["total"]["copies"]
        for given, said in (
            ((), "ask with --curve-secret-key and --curve-peer"),
            (secret, "with both --curve-secret-key"),
            ((*secret, *keys[:2]), "--curve-peer is given 1 times and --from 2 times"),
            ((*secret, *keys[2:], *keys[:2]), "--curve-peer"),
        ):
            assert said in plan.refusal(None, *sides, *given)


def test_engine_that_cannot_be_reached_is_reported(plan: PlanCommand) -> None:
    with running(engine_of(plan.folder, TINY)) as address:
        pass
    said = plan.refusal(None, *both(address, address))
    for part in ("nobody listens there", "it is the engine's side_channel_host and side_channel"):
        assert part in said.partition(f"kvferry: --from {address}: ")[2]


INVALID_SIDES = {
    "": "0 of --prefill and --decode and 0 times --from are given",
    "--prefill=tp=1": "1 of --prefill and --decode and 0 times --from are given",
    "--from=h:1": "0 of --prefill and --decode and 1 times --from are given",
    "--prefill=a.json --decode=b.json --from=h:1": "and 1 times --from are given",
    "--from=h:1 --from=h:1 --from=h:1": "and 3 times --from are given",
    "--prefill=a.json --decode=b.json --curve-secret-key=env:K": "--from 0 times",
    "--from=host:0 --from=h:1": "--from 'host:0' is not HOST:PORT",
}


@pytest.mark.parametrize("arguments", INVALID_SIDES)
def test_invalid_sides_are_refused(plan: PlanCommand, arguments: str) -> None:
    assert INVALID_SIDES[arguments] in plan.refusal(None, "", "", *arguments.split())
