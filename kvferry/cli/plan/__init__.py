"""``kvferry plan``: which rank reads what from which, of engines that run or do not run yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvferry.cli.output import print_json, require_matplotlib
from kvferry.cli.plan.advice import advice_for
from kvferry.cli.plan.early import EarlyQuestion, early_cases
from kvferry.cli.plan.engines import EngineError, SettingsError, write_engine
from kvferry.cli.plan.estimate import estimate_reads
from kvferry.cli.plan.model import read_model
from kvferry.cli.plan.report import PlanResult, print_result, record_of
from kvferry.cli.plan.sides import RunningOptions, read_sides, refusal
from kvferry.core.errors import KVFerryError


def run(
    *,
    model: Path | None,
    sides: Mapping[str, str | None],
    running: RunningOptions,
    tokens: int,
    dtype: str | None,
    early: EarlyQuestion | None,
    svg: Path | None,
    as_json: bool,
    write_layouts: Path | None,
) -> None:
    """Plan a request, and print which decode rank reads what from which prefill rank."""
    if svg is not None:
        require_matplotlib("--svg")
    described = None if model is None else read_model(model, dtype)
    if described is None and dtype is not None:
        raise SettingsError("--dtype is for a model's config file; layouts say their own")
    longest = max(tokens, early.longest if early else 0)
    one, other = read_sides(sides, running, described, longest)
    refused = refusal(one, other)
    try:
        estimate = estimate_reads(one.engine, other.engine, tokens)
    except KVFerryError as exc:
        if not refused:
            raise
        raise EngineError(f"{exc}. {refused}") from exc
    result = PlanResult(
        model=described,
        prefill=one,
        decode=other,
        estimate=estimate,
        advice=advice_for(
            described, (one.engine, one.source), (other.engine, other.source), estimate
        ),
        early=(early, early_cases(early, one.engine, other.engine, estimate)) if early else None,
        notes=(*one.notes, *other.notes, *filter(None, (refused,))),
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
