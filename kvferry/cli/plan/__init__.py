"""``kvferry plan``: which rank reads what from which, of engines that run or do not run yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvferry.cli.output import print_json, require_matplotlib
from kvferry.cli.plan.advice import advice_for
from kvferry.cli.plan.early import PrefillSpeed, early_case, parse_bandwidth
from kvferry.cli.plan.engines import SettingsError, write_engine
from kvferry.cli.plan.estimate import estimate_reads
from kvferry.cli.plan.model import read_model
from kvferry.cli.plan.report import PlanResult, print_result, record_of
from kvferry.cli.plan.sides import read_sides


def run(
    *,
    model: Path | None,
    prefill: str | None,
    decode: str | None,
    addresses: Sequence[str] | None,
    curve_secret_key: str,
    curve_peer: Sequence[str] | None,
    tokens: int,
    dtype: str | None,
    bandwidth: Sequence[str] | None,
    prompt: Sequence[int] | None,
    chunk: int,
    prefill_rate: float,
    hop: float,
    svg: Path | None,
    as_json: bool,
    write_layouts: Path | None,
) -> None:
    """Plan a request, and print which decode rank reads what from which prefill rank."""
    if svg is not None:
        require_matplotlib("--svg")
    if model is None and dtype is not None:
        raise SettingsError("--dtype is for a model's config file; layouts say their own")
    if prompt and not bandwidth:
        raise SettingsError(
            f"--prompt {prompt[0]} is a prompt for --bandwidth: add --bandwidth, such as 25Gbit, "
            "or give the length of the planned request as --tokens"
        )
    described = None if model is None else read_model(model, dtype)
    bandwidths = [parse_bandwidth(text) for text in bandwidth or ()]
    prompts = prompt or (tokens,)
    sides = read_sides(
        {"prefill": prefill, "decode": decode},
        addresses or (),
        (curve_secret_key, curve_peer or ()),
        described,
        max(tokens, *prompts),
    )
    engines = sides[0].engine, sides[1].engine
    estimate = estimate_reads(*engines, tokens)
    early = None
    if bandwidths:
        own = PrefillSpeed(chunk=chunk, prefill_rate=prefill_rate, hop_seconds=hop / 1e3)
        each = [estimate if n == tokens else estimate_reads(*engines, n) for n in prompts]
        early = own, [early_case(own, rate, found) for rate in bandwidths for found in each]
    result = PlanResult(
        model=described,
        prefill=sides[0],
        decode=sides[1],
        estimate=estimate,
        advice=advice_for(described, *sides, estimate),
        early=early,
    )
    if write_layouts is not None:
        for side in sides:
            write_engine(write_layouts / f"{side.name}.json", side.engine)
    if svg is not None:
        from kvferry.cli.plan.picture import draw_svg

        draw_svg(svg, result)
    if as_json:
        print_json(record_of(result))
    else:
        print_result(result)
