"""The picture of ``kvferry plan --svg``: ribbons from prefill ranks to decode ranks.

This module needs matplotlib. It draws without pyplot, which would look for a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Outline

from kvferry.cli.formatting import counted, size
from kvferry.cli.plan.engines import EngineError
from kvferry.cli.plan.estimate import Estimate, ReadEstimate, merged
from kvferry.cli.plan.fields import contents_of, text_of
from kvferry.cli.plan.report import PlanResult
from kvferry.cli.plan.sides import Side

# In inches: from one rank to the next, of the picture, of a rank's box, and beside it.
STEP, WIDTH, BOX, MARGIN = 0.62, 10.0, 2.7, 0.25
FILLED = 0.86
"""Height of a rank's box as a fraction of ``STEP``."""
INK, FAINT, PAPER = "#1f2430", "#8a93a6", "#f4f6fa"


def draw_svg(path: Path, result: PlanResult) -> None:
    """Draw which rank reads from which, as ribbons whose width is the number of bytes."""
    estimate, sides = result.estimate, (result.prefill, result.decode)
    rows = max(len(side.engine.ranks) for side in sides)
    figure = Figure(figsize=(WIDTH, rows * STEP + 1.3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(-0.2, rows * STEP + 1.1))
    axes.axis("off")
    lefts, rights = (_centres(len(side.engine.ranks), rows) for side in sides)
    by_rank = [estimate.of_prefill(n) for n in range(len(lefts))]
    by_rank += [estimate.of_decode(n) for n in range(len(rights))]
    totals = [merged(read.sizes for read in reads).nbytes for reads in by_rank]
    _draw_ribbons(axes, by_rank, [*lefts, *rights], STEP * FILLED * 0.9 / max(1, *totals))
    for told, teller in estimate.told.items():
        xs, ys = (BOX + MARGIN, WIDTH - BOX - MARGIN), (lefts[told], rights[teller])
        axes.plot(xs, ys, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    if estimate.told:
        meaning = "dashed: only told that nobody reads it"
        axes.text(WIDTH / 2, -0.08, meaning, ha="center", **_text(7, FAINT))
    _draw_side(axes, result.prefill, lefts, MARGIN, totals)
    _draw_side(axes, result.decode, rights, WIDTH - BOX - MARGIN, totals[len(lefts) :])
    _title(axes, estimate, rows)
    # Keep text as text, for search and screen readers, and make equal files from equal plans.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvferry"}):
        try:
            figure.savefig(path, format="svg", metadata={"Date": None, "Title": "kvferry plan"})
        except OSError as exc:
            raise EngineError(f"{path} cannot be written: {exc.strerror}") from exc


def _centres(count: int, rows: int) -> list[float]:
    each = rows * STEP / count
    return [rows * STEP - each * (rank + 0.5) for rank in range(count)]


def _draw_ribbons(
    axes: Axes, by_rank: Sequence[Sequence[ReadEstimate]], centres: Sequence[float], scale: float
) -> None:
    """Draw the reads of all ranks, prefill's first, each in the colour of its prefill rank."""
    # Bottom and top of both ends of each ribbon, stacked from top to bottom at a rank's box.
    ends: dict[int, list[tuple[float, float]]] = {}
    for reads, centre in zip(by_rank, centres, strict=True):
        top = centre + sum(read.sizes.nbytes for read in reads) * scale / 2
        for read in reads:
            bottom = top - read.sizes.nbytes * scale
            ends.setdefault(id(read), []).append((bottom, top))
            top = bottom
    x0, x1 = BOX + MARGIN, WIDTH - BOX - MARGIN
    middle, curve = (x0 + x1) / 2, [Outline.CURVE4] * 3
    prefills = max((read.prefill for reads in by_rank for read in reads), default=0)
    for read in dict.fromkeys(read for reads in by_rank for read in reads):
        (low0, top0), (low1, top1) = ends[id(read)]
        vertices = [(x0, top0), (middle, top0), (middle, top1), (x1, top1)]
        vertices += [(x1, low1), (middle, low1), (middle, low0), (x0, low0), (x0, top0)]
        codes = [Outline.MOVETO, *curve, Outline.LINETO, *curve, Outline.CLOSEPOLY]
        colour = mpl.colormaps["viridis"](0.06 + 0.76 * read.prefill / max(1, prefills))
        ribbon = Outline(vertices, codes)
        axes.add_patch(
            PathPatch(ribbon, facecolor=colour, edgecolor=colour, linewidth=0.4, alpha=0.55)
        )


def _draw_side(
    axes: Axes, side: Side, centres: Sequence[float], x: float, totals: Sequence[int]
) -> None:
    top, height = max(centres) + STEP, STEP * FILLED
    axes.text(x, top, side.name, fontweight="bold", **_text(11, INK))
    axes.text(x, top - 0.21, _cut(str(side.source), 60), **_text(7, FAINT))
    rounded = "round,pad=0,rounding_size=0.08"
    for rank, (layout, centre) in enumerate(zip(side.engine.ranks, centres, strict=True)):
        at = x, centre - height / 2
        box = FancyBboxPatch(at, BOX, height, rounded, facecolor=PAPER, edgecolor=FAINT, lw=0.8)
        axes.add_patch(box)
        amount = size(totals[rank]) if totals[rank] else "not read"
        axes.text(x + 0.1, centre + 0.09, f"{side.name} {side.rank_name(rank)}", **_text(8, INK))
        axes.text(x + BOX - 0.1, centre + 0.09, amount, ha="right", **_text(7, INK))
        held = text_of([contents_of((f.key, f.shard_range) for f in layout.fields)])
        axes.text(x + 0.1, centre - 0.11, _cut(held, 48), **_text(7, FAINT))


def _text(points: float, colour: str) -> dict[str, Any]:
    return {"fontsize": points, "color": colour, "va": "center", "parse_math": False}


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _title(axes: Axes, estimate: Estimate, rows: int) -> None:
    sizes, top = estimate.sizes, rows * STEP + 0.85
    title = f"A request of {counted(estimate.tokens, 'token')}"
    text = f"{size(sizes.nbytes)} in {counted(sizes.copies, 'copy')}, median {size(sizes.median)}"
    axes.text(WIDTH / 2, top, title, ha="center", **_text(9, INK))
    axes.text(WIDTH / 2, top - 0.2, text, ha="center", **_text(8, FAINT))
