"""``kvferry plan``: which rank reads what from which, before any engine runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from kvferry.cli.plan import report
from kvferry.cli.plan.advice import Advice, advise, advise_alike, is_many, is_small
from kvferry.cli.plan.engines import (
    Engine,
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


class _Side(NamedTuple):
    """One of the two engines, and the text that described it.

    Attributes:
        name: ``prefill`` or ``decode``.
        engine: The layouts of the engine's ranks.
        source: The settings from which the layouts were computed, or the JSON file that has them.
        notes: What else there is to know about the engine, a sentence each.
    """

    name: str
    engine: Engine
    source: PlanSettings | Path
    notes: tuple[str, ...] = ()


def run(
    *,
    model: Path | None,
    prefill: str,
    decode: str,
    tokens: int = 4096,
    dtype: str | None = None,
    svg: Path | None = None,
    as_json: bool = False,
    write_layouts: Path | None = None,
) -> None:
    """Plan a request, and print which decode rank reads what from which prefill rank.

    Args:
        model: A model's ``config.json`` or its folder; ``None`` if both engines are JSON files.
        prefill: Settings of the prefill engine, such as ``tp=2,block_size=16,layout=LBHNC``, or a
            JSON file of its layouts.
        decode: Settings, or a JSON file, of the decode engine.
        tokens: Number of tokens in the request.
        dtype: Element type of the cache; by default the config file's.
        svg: File for a picture.
        as_json: Whether to print JSON instead of tables.
        write_layouts: Folder for both engines' layouts as JSON.

    Raises:
        KVFerryError: An argument is wrong, or the layouts cannot be matched.
    """
    described = None if model is None else read_model(model, dtype)
    if described is None and dtype is not None:
        raise SettingsError("--dtype is for a model's config file; JSON layouts say their own")
    producer = _side("prefill", prefill, described, tokens)
    consumer = _side("decode", decode, described, tokens)
    estimate = estimate_reads(producer.engine, consumer.engine, tokens)
    advice = _advice(described, producer, consumer, estimate)
    notes = (*producer.notes, *consumer.notes)
    if write_layouts is not None:
        for side in (producer, consumer):
            write_engine(write_layouts / f"{side.name}.json", side.engine)
    if svg is not None:
        _draw(svg, estimate, producer, consumer)
    if as_json:
        record = report.json_record(estimate, producer.engine, consumer.engine, advice)
        Console().print_json(json.dumps(record | {"notes": notes}))
    else:
        _print(described, estimate, producer, consumer, advice, notes)


def _side(name: str, text: str, model: Model | None, tokens: int) -> _Side:
    """Return the engine that an option describes.

    Args:
        name: ``prefill`` or ``decode``, which is also the option's name.
        text: The option's value: settings, or the name of a JSON file.
        model: The model of the engine; ``None`` if no config file was named.
        tokens: Number of tokens of a request that must fit into the engine's cache.

    Raises:
        KVFerryError: The settings or the file are refused.
    """
    option = f"--{name}"
    if text.endswith(".json") or "=" not in text:
        return _Side(name, read_engine(Path(text)), Path(text))
    if model is None:
        raise SettingsError(
            f"{option} {text!r} is how a model is set up: name the model's config.json first, or "
            "give a JSON file with the engine's layouts"
        )
    asked = parse(text, option)
    engine = make_engine(model, asked, tokens)
    settings = fit_states(model, asked)
    notes = (
        f"Pages of {name} have {settings.block_size:,} tokens instead of {asked.block_size}: vLLM "
        "enlarges them until a page of attention has room for a state.",
    )
    return _Side(name, engine, settings, notes if settings != asked else ())


def _advice(
    model: Model | None, prefill: _Side, decode: _Side, estimate: Estimate
) -> Advice | None:
    """Return advice on how to make copies larger; ``None`` if there is no need, or nothing to do.

    Small copies are explained even where nothing helps.

    Args:
        model: The model of both engines; ``None`` if no config file was named.
        prefill: The prefill engine.
        decode: The decode engine.
        estimate: The reads and copies that a request takes between these engines.
    """
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
    """Write the picture to an SVG file.

    Raises:
        SettingsError: matplotlib is not installed.
        EngineError: The file cannot be written.
    """
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
