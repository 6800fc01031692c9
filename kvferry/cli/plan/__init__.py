"""``kvferry plan``: which rank reads what from which, of engines that run or do not run yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvferry.cli.output import print_json, require_matplotlib
from kvferry.cli.plan.advice import advice_for
from kvferry.cli.plan.early import EarlyQuestion, early_cases
from kvferry.cli.plan.engines import (
    EngineError,
    PlanSettings,
    SettingsError,
    fit_states,
    make_engine,
    parse,
    read_engine,
    write_engine,
)
from kvferry.cli.plan.estimate import Estimate, estimate_reads
from kvferry.cli.plan.model import Model, read_model
from kvferry.cli.plan.report import PlanResult, Side, print_result, record_of
from kvferry.cli.plan.running import (
    RunningEngine,
    keys_of_engines,
    read_running,
    refusals,
    with_keys_of,
)
from kvferry.core.errors import KVFerryError

UNKNOWN_WINDOWS = (
    "The side channel does not say which layers of decode have a sliding window: all tokens are "
    "counted. Name the model's config.json, too, if it has windows."
)


def run(
    *,
    model: Path | None,
    prefill: str | None,
    decode: str | None,
    addresses: Sequence[str] = (),
    secret_key: str = "",
    peers: Sequence[str] = (),
    tokens: int = 4096,
    dtype: str | None = None,
    early: EarlyQuestion | None = None,
    svg: Path | None = None,
    as_json: bool = False,
    write_layouts: Path | None = None,
) -> None:
    """Plan a request, and print which decode rank reads what from which prefill rank."""
    if svg is not None:
        require_matplotlib("--svg")
    described = None if model is None else read_model(model, dtype)
    if described is None and dtype is not None:
        raise SettingsError("--dtype is for a model's config file; layouts say their own")
    longest = max(tokens, early.longest if early else 0)
    texts = {"prefill": prefill, "decode": decode}
    running = _running(texts, addresses, secret_key, peers)
    one, other = (
        _running_side(name, running[name], described)
        if text is None
        else _side(name, text, described, longest)
        for name, text in texts.items()
    )
    one, other = _with_equal_keys(one, other), _with_equal_keys(other, one)
    refused = refusals(running["prefill"], running["decode"]) if len(running) > 1 else ()
    estimate = _estimate(one, other, tokens, refused)
    result = PlanResult(
        model=described,
        prefill=one,
        decode=other,
        estimate=estimate,
        advice=advice_for(
            described, (one.engine, one.source), (other.engine, other.source), estimate
        ),
        early=(early, early_cases(early, one.engine, other.engine, estimate)) if early else None,
        notes=(*one.notes, *other.notes, *refused),
    )
    if write_layouts is not None:
        for side in (one, other):
            write_engine(write_layouts / f"{side.name}.json", side.engine)
    if svg is not None:
        from kvferry.cli.plan.picture import draw_svg

        draw_svg(svg, result)
    if as_json:
        print_json(record_of(result))
    else:
        print_result(result)


def _running(
    texts: Mapping[str, str | None], addresses: Sequence[str], secret_key: str, peers: Sequence[str]
) -> dict[str, RunningEngine]:
    """Return the running engines by side: those whose option has no value."""
    missing = [name for name, text in texts.items() if text is None]
    if len(missing) > len(addresses):
        raise SettingsError(
            f"the {missing[len(addresses)]} engine is missing: give --{missing[len(addresses)]} "
            "with settings or a JSON file, or --from HOST:PORT for an engine that runs"
        )
    if len(missing) < len(addresses):
        raise SettingsError(
            f"--from is given {len(addresses)} times, and stands for the {len(missing)} of "
            "--prefill and --decode that are left out: leave one more out, or one --from"
        )
    if not addresses and not secret_key and not peers:
        return {}
    keys = keys_of_engines(secret_key, peers, len(addresses))
    return {
        name: read_running(address, key)
        for name, address, key in zip(missing, addresses, keys, strict=True)
    }


def _running_side(name: str, running: RunningEngine, model: Model | None) -> Side:
    notes = (UNKNOWN_WINDOWS,) if model is None and name == "decode" else ()
    return Side(name=name, engine=running.engine(model), source=running, notes=notes)


def _side(name: str, text: str, model: Model | None, tokens: int) -> Side:
    """Return the engine that the settings, or the JSON file, of an option describe."""
    option = f"--{name}"
    if text.endswith(".json") or "=" not in text:
        return Side(name=name, engine=read_engine(Path(text)), source=Path(text))
    if model is None:
        raise SettingsError(
            f"{option} {text!r} is how a model is set up: name the model's config.json first, or "
            "give a JSON file with the engine's layouts"
        )
    asked = parse(text, option)
    try:
        settings = fit_states(model, asked)
    except SettingsError as exc:
        raise SettingsError(f"{option}: {exc}") from None
    enlarged = (
        f"Pages of {name} have {settings.block_size:,} tokens instead of {asked.block_size}: vLLM "
        "enlarges them until a page of attention has room for a state.",
    )
    return Side(
        name=name,
        engine=make_engine(model, asked, tokens),
        source=settings,
        notes=enlarged if settings != asked else (),
    )


def _with_equal_keys(side: Side, other: Side) -> Side:
    """Return a side computed from settings with the keys of a running engine, if that is other."""
    if not isinstance(side.source, PlanSettings) or not isinstance(other.source, RunningEngine):
        return side
    return replace(side, engine=with_keys_of(side.engine, other.engine))


def _estimate(prefill: Side, decode: Side, tokens: int, refused: Sequence[str]) -> Estimate:
    """Return the reads and copies that a request takes; an error has the refusal, too."""
    try:
        return estimate_reads(prefill.engine, decode.engine, tokens)
    except KVFerryError as exc:
        if not refused:
            raise
        raise EngineError(". ".join((str(exc), *refused))) from exc
