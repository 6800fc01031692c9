"""``kvferry plan``: which rank reads what from which, of engines that run or do not run yet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from kvferry.cli.plan import report
from kvferry.cli.plan.advice import Advice, advise, advise_alike, is_many, is_small
from kvferry.cli.plan.early import EarlyQuestion, early_cases
from kvferry.cli.plan.engines import (
    Engine,
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
from kvferry.core.errors import KVFerryError

if TYPE_CHECKING:
    from kvferry.cli.plan.running import RunningEngine


class _Side(NamedTuple):
    """One of the two engines, and the text that described it.

    Attributes:
        name: ``prefill`` or ``decode``.
        engine: The layouts of the engine's ranks.
        source: The settings from which the layouts were computed, the JSON file that has them, or
            the running engine that publishes them.
        notes: What else there is to know about the engine, a sentence each.
    """

    name: str
    engine: Engine
    source: PlanSettings | Path | RunningEngine
    notes: tuple[str, ...] = ()


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
    described = None if model is None else read_model(model, dtype)
    if described is None and dtype is not None:
        raise SettingsError("--dtype is for a model's config file; layouts say their own")
    longest = max(tokens, early.longest if early else 0)
    texts = {"prefill": prefill, "decode": decode}
    running = _running(texts, addresses, secret_key, peers)
    refusal = tuple(_refusal(running))
    producer, consumer = (
        _running_side(name, running[name], described)
        if text is None
        else _side(name, text, described, longest)
        for name, text in texts.items()
    )
    producer, consumer = _with_equal_keys(producer, consumer), _with_equal_keys(consumer, producer)
    estimate = _estimate(producer, consumer, tokens, refusal)
    advice = _advice(described, producer, consumer, estimate)
    cases = early_cases(early, producer.engine, consumer.engine, estimate) if early else []
    notes = (*producer.notes, *consumer.notes, *refusal)
    if write_layouts is not None:
        for side in (producer, consumer):
            write_engine(write_layouts / f"{side.name}.json", side.engine)
    if svg is not None:
        _draw(svg, estimate, producer, consumer)
    if as_json:
        record = report.json_record(estimate, producer.engine, consumer.engine, advice)
        more = {"early": report.early_record(early, cases) if early else None, "notes": notes}
        Console().print_json(json.dumps(record | more))
        return
    _print(described, estimate, producer, consumer, advice, notes)
    if early is not None:
        report.print_early(Console(highlight=False), early, cases)


def _running(
    texts: Mapping[str, str | None], addresses: Sequence[str], secret_key: str, peers: Sequence[str]
) -> dict[str, RunningEngine]:
    """Return the running engines by side, ``prefill`` or ``decode``."""
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
    from kvferry.cli.plan.running import keys_of_engines, read_running

    keys = keys_of_engines(secret_key, peers, len(addresses))
    return {
        name: read_running(address, key)
        for name, address, key in zip(missing, addresses, keys, strict=True)
    }


def _running_side(name: str, running: RunningEngine, model: Model | None) -> _Side:
    """Return the side of a running engine."""
    notes = (
        "The side channel does not say which layers of decode have a sliding window: all tokens "
        "are counted. Name the model's config.json, too, if it has windows.",
    )
    counts_all = model is None and name == "decode"
    return _Side(name, running.engine(model), running, notes if counts_all else ())


def _with_equal_keys(side: _Side, other: _Side) -> _Side:
    """Return a side whose fields have the keys of the other side."""
    if not isinstance(side.source, PlanSettings) or isinstance(other.source, PlanSettings | Path):
        return side
    from kvferry.cli.plan.running import with_keys_of

    return side._replace(engine=with_keys_of(side.engine, other.engine))


def _refusal(running: Mapping[str, RunningEngine]) -> Iterator[str]:
    """Yield why two running engines refuse each other at the handshake, if they do."""
    if len(running) < 2:
        return
    from kvferry.cli.plan.running import refusal

    reason = refusal(running["prefill"], running["decode"])
    if reason is not None:
        yield f"The handshake refuses this pair: {reason}"


def _side(name: str, text: str, model: Model | None, tokens: int) -> _Side:
    """Return the engine that an option describes."""
    option = f"--{name}"
    if text.endswith(".json") or "=" not in text:
        return _Side(name, read_engine(Path(text)), Path(text))
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
    engine = make_engine(model, asked, tokens)
    notes = (
        f"Pages of {name} have {settings.block_size:,} tokens instead of {asked.block_size}: vLLM "
        "enlarges them until a page of attention has room for a state.",
    )
    return _Side(name, engine, settings, notes if settings != asked else ())


def _estimate(prefill: _Side, decode: _Side, tokens: int, refusal: Sequence[str]) -> Estimate:
    """Return the reads and copies that a request takes."""
    try:
        return estimate_reads(prefill.engine, decode.engine, tokens)
    except KVFerryError as exc:
        if not refusal:
            raise
        raise EngineError(". ".join((str(exc), *refusal))) from exc


def _advice(
    model: Model | None, prefill: _Side, decode: _Side, estimate: Estimate
) -> Advice | None:
    """Return advice on how to make copies larger; ``None`` if there is none."""
    if not is_small(estimate) and not is_many(estimate):
        return None
    one, other = prefill.source, decode.source
    if model is not None and isinstance(one, PlanSettings) and isinstance(other, PlanSettings):
        advice = advise(model, one, other, estimate)
    else:
        advice = advise_alike(prefill.engine, decode.engine, estimate)
    return advice if is_small(estimate) or advice.changes else None


def _print(
    model: Model | None,
    estimate: Estimate,
    prefill: _Side,
    decode: _Side,
    advice: Advice | None,
    notes: Sequence[str],
) -> None:
    """Print the tables, the notes, and the advice if there is any."""
    console = Console(highlight=False)
    if model is not None:
        report.print_model(console, model)
    report.print_engines(console, [side[:3] for side in (prefill, decode)])
    report.print_notes(console, notes)
    report.print_total(console, estimate)
    report.print_reads(console, estimate, prefill.engine, decode.engine)
    report.print_served(console, estimate, prefill.engine)
    if advice is not None:
        report.print_advice(console, estimate, advice)


def _draw(path: Path, estimate: Estimate, prefill: _Side, decode: _Side) -> None:
    """Write the picture to an SVG file."""
    try:
        from kvferry.cli.plan.picture import draw_svg
    except ModuleNotFoundError as exc:
        if exc.name != "matplotlib":
            raise
        raise SettingsError(
            "--svg draws with matplotlib, which is not installed: pip install 'kvferry[plot]'"
        ) from exc
    draw_svg(
        path, estimate, (prefill.engine, str(prefill.source)), (decode.engine, str(decode.source))
    )
