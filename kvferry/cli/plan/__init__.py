"""``kvferry plan``: who reads what from whom, before any engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from kvferry.cli.plan import report
from kvferry.cli.plan.advice import Advice, advise, advise_alike, is_small
from kvferry.cli.plan.engines import (
    Engine,
    PlanSettings,
    SettingsError,
    make_engine,
    parse,
    read_engine,
    write_engine,
)
from kvferry.cli.plan.estimate import Estimate, estimate_reads
from kvferry.cli.plan.model import Model, read_model


class _Side(NamedTuple):
    """One engine, and how it was given: as settings, or else as a file."""

    name: str
    engine: Engine
    said: PlanSettings | Path


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
    """Plan, and print who reads what from whom.

    Args:
        model: a model's ``config.json`` or its folder; None if both engines are JSON files.
        prefill, decode: settings such as ``tp=2,block_size=16,layout=LBHNC``, or a JSON file.
        tokens: how long the request is.
        dtype: element type of the cache; that of the config file if None.
        svg: where to make_engine a picture.
        as_json: print JSON instead of tables.
        write_layouts: folder for both engines' layouts as JSON.

    Raises:
        KVFerryError: something given is wrong, or the layouts cannot be matched; says what.
    """
    drawn = None if model is None else read_model(model, dtype)
    if drawn is None and dtype is not None:
        raise SettingsError("--dtype is for a model's config file; JSON layouts say their own")
    producer = _side("prefill", prefill, drawn, tokens)
    consumer = _side("decode", decode, drawn, tokens)
    found = estimate_reads(producer.engine, consumer.engine, tokens)
    advice = _advice(drawn, producer, consumer, found) if is_small(found) else None
    if write_layouts is not None:
        for side in (producer, consumer):
            write_engine(write_layouts / f"{side.name}.json", side.engine)
    if svg is not None:
        _draw(svg, found, producer, consumer)
    if as_json:
        Console().print_json(
            json.dumps(report.json_record(found, producer.engine, consumer.engine, advice))
        )
    else:
        _print(drawn, found, producer, consumer, advice)


def _side(name: str, said: str, model: Model | None, tokens: int) -> _Side:
    option = f"--{name}"
    if said.endswith(".json") or "=" not in said:
        return _Side(name, read_engine(Path(said)), Path(said))
    if model is None:
        raise SettingsError(
            f"{option} {said!r} is how a model is set up: name the model's config.json first, or "
            "give a JSON file with the engine's layouts"
        )
    settings = parse(said, option)
    return _Side(name, make_engine(model, settings, tokens), settings)


def _advice(model: Model | None, prefill: _Side, decode: _Side, found: Estimate) -> Advice:
    one, other = prefill.said, decode.said
    if model is not None and isinstance(one, PlanSettings) and isinstance(other, PlanSettings):
        return advise(model, one, other, found)
    return advise_alike(prefill.engine, decode.engine, found)


def _print(
    model: Model | None, found: Estimate, prefill: _Side, decode: _Side, advice: Advice | None
) -> None:
    console = Console(highlight=False)
    if model is not None:
        report.print_model(console, model)
    report.print_engines(console, (prefill, decode))
    report.print_total(console, found)
    report.print_reads(console, found, prefill.engine, decode.engine)
    report.print_served(console, found, prefill.engine)
    if advice is not None:
        report.print_advice(console, found, advice)


def _draw(path: Path, found: Estimate, prefill: _Side, decode: _Side) -> None:
    try:
        from kvferry.cli.plan.picture import draw_svg
    except ModuleNotFoundError as exc:
        if exc.name != "matplotlib":
            raise
        raise SettingsError(
            "--svg draws with matplotlib, which is not installed: pip install 'kvferry[plot]'"
        ) from exc
    draw_svg(path, found, (prefill.engine, str(prefill.said)), (decode.engine, str(decode.said)))
