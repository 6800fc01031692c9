"""The picture of ``kvferry plan --svg``: ribbons from prefill ranks to decode ranks.

This module needs matplotlib. It draws without pyplot, which would look for a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Outline

from kvferry.cli.formatting import counted, size
from kvferry.cli.plan.engines import Engine, EngineError
from kvferry.cli.plan.estimate import Estimate, ReadEstimate
from kvferry.cli.plan.report import of_fields, rank_name

STEP = 0.62
"""Inches from one rank to the next."""
WIDTH = 10.0
"""Width of the picture in inches."""
BOX = 2.7
"""Width of a rank's box in inches."""
MARGIN = 0.25
FILLED = 0.86
"""Height of a rank's box as a fraction of ``STEP``."""
INK, FAINT, PAPER = "#1f2430", "#8a93a6", "#f4f6fa"


class _Ribbon(NamedTuple):
    """The ribbon of one read, from a prefill rank to a decode rank.

    Attributes:
        read: The read.
        left: Bottom and top of the ribbon's end at prefill, in inches from the picture's bottom.
        right: Bottom and top of the ribbon's end at decode.
    """

    read: ReadEstimate
    left: tuple[float, float]
    right: tuple[float, float]


def draw_svg(
    path: Path, estimate: Estimate, prefill: tuple[Engine, str], decode: tuple[Engine, str]
) -> None:
    """Draw which rank reads from which, as ribbons whose width is the number of bytes."""
    rows = max(len(prefill[0].ranks), len(decode[0].ranks))
    figure = Figure(figsize=(WIDTH, rows * STEP + 1.3))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(-0.2, rows * STEP + 1.1))
    axes.axis("off")
    lefts, rights = (_centres(len(engine.ranks), rows) for engine, _ in (prefill, decode))
    for ribbon in _ribbons(estimate, lefts, rights):
        _draw_ribbon(axes, ribbon, len(lefts))
    _draw_told(axes, estimate, lefts, rights)
    _draw_side(axes, "prefill", *prefill, lefts, MARGIN, estimate)
    _draw_side(axes, "decode", *decode, rights, WIDTH - BOX - MARGIN, estimate)
    _title(axes, estimate, rows)
    # Keep text as text, for search and screen readers, and make equal files from equal plans.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvferry"}):
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write a picture to an SVG file."""
    try:
        figure.savefig(path, format="svg", metadata={"Date": None, "Title": "kvferry plan"})
    except OSError as exc:
        raise EngineError(f"{path} cannot be written: {exc.strerror}") from exc


def _centres(count: int, rows: int) -> list[float]:
    """Return the vertical centres of an engine's boxes in inches, from top to bottom."""
    each = rows * STEP / count
    return [rows * STEP - each * (rank + 0.5) for rank in range(count)]


def _ribbons(estimate: Estimate, lefts: Sequence[float], rights: Sequence[float]) -> list[_Ribbon]:
    """Return a ribbon for each read, whose width is proportional to the read's bytes."""
    busiest = max(
        1,
        *(estimate.sizes_of(estimate.of_prefill(rank)).total for rank in range(len(lefts))),
        *(estimate.sizes_of(estimate.of_decode(rank)).total for rank in range(len(rights))),
    )
    scale = STEP * FILLED * 0.9 / busiest
    left: dict[int, tuple[float, float]] = {}
    right: dict[int, tuple[float, float]] = {}
    for rank, centre in enumerate(lefts):
        left |= _stacked(estimate.of_prefill(rank), centre, scale)
    for rank, centre in enumerate(rights):
        right |= _stacked(estimate.of_decode(rank), centre, scale)
    return [_Ribbon(read, left[id(read)], right[id(read)]) for read in estimate.reads]


def _stacked(
    reads: Sequence[ReadEstimate], centre: float, scale: float
) -> dict[int, tuple[float, float]]:
    """Return where the ribbons of some reads end at a rank's box, stacked from top to bottom."""
    heights = [read.sizes.total * scale for read in reads]
    tops = [centre + sum(heights) / 2]
    for height in heights:
        tops.append(tops[-1] - height)
    return {id(read): (low, top) for read, (top, low) in zip(reads, pairwise(tops), strict=True)}


def _draw_ribbon(axes: Axes, ribbon: _Ribbon, colours: int) -> None:
    """Draw a ribbon in the colour of its prefill rank."""
    x0, x1 = BOX + MARGIN, WIDTH - BOX - MARGIN
    middle = (x0 + x1) / 2
    (low0, top0), (low1, top1) = ribbon.left, ribbon.right
    vertices = [(x0, top0), (middle, top0), (middle, top1), (x1, top1)]
    vertices += [(x1, low1), (middle, low1), (middle, low0), (x0, low0), (x0, top0)]
    curve = [Outline.CURVE4] * 3
    codes = [Outline.MOVETO, *curve, Outline.LINETO, *curve, Outline.CLOSEPOLY]
    colour = mpl.colormaps["viridis"](0.06 + 0.76 * ribbon.read.prefill / max(1, colours - 1))
    axes.add_patch(
        PathPatch(
            Outline(vertices, codes), facecolor=colour, edgecolor=colour, linewidth=0.4, alpha=0.55
        )
    )


def _draw_told(
    axes: Axes, estimate: Estimate, lefts: Sequence[float], rights: Sequence[float]
) -> None:
    """Draw a dashed line from each unread prefill rank to the decode rank that tells it."""
    for told, teller in estimate.told.items():
        xs, ys = (BOX + MARGIN, WIDTH - BOX - MARGIN), (lefts[told], rights[teller])
        axes.plot(xs, ys, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    if estimate.told:
        meaning = "dashed: only told that nobody reads it"
        axes.text(WIDTH / 2, -0.08, meaning, ha="center", **_text(7, FAINT))


def _draw_side(
    axes: Axes,
    side: str,
    engine: Engine,
    text: str,
    centres: Sequence[float],
    x: float,
    estimate: Estimate,
) -> None:
    """Draw the boxes of an engine's ranks, with what each rank holds and how much is read."""
    top = max(centres) + STEP
    axes.text(x, top, side, fontweight="bold", **_text(11, INK))
    axes.text(x, top - 0.21, _cut(text, 60), **_text(7, FAINT))
    for rank, (layout, centre) in enumerate(zip(engine.ranks, centres, strict=True)):
        low = centre - STEP * FILLED / 2
        box = FancyBboxPatch(
            (x, low),
            BOX,
            STEP * FILLED,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=PAPER,
            edgecolor=FAINT,
            linewidth=0.8,
        )
        axes.add_patch(box)
        reads = estimate.of_prefill(rank) if side == "prefill" else estimate.of_decode(rank)
        amount = size(estimate.sizes_of(reads).total) if reads else "not read"
        axes.text(x + 0.1, centre + 0.09, f"{side} {rank_name(engine, rank)}", **_text(8, INK))
        axes.text(x + BOX - 0.1, centre + 0.09, amount, ha="right", **_text(7, INK))
        held = of_fields((f.key, f.shard_range) for f in layout.fields)
        axes.text(x + 0.1, centre - 0.11, _cut(held, 48), **_text(7, FAINT))


def _text(points: float, colour: str) -> dict[str, Any]:
    """Return matplotlib's keyword arguments for text of a size in points and a colour."""
    return {"fontsize": points, "color": colour, "va": "center", "parse_math": False}


def _cut(text: str, limit: int) -> str:
    """Return a text, cut to ``limit`` characters if it is longer."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _title(axes: Axes, estimate: Estimate, rows: int) -> None:
    """Draw the picture's title above its ``rows`` of boxes."""
    sizes = estimate.sizes
    middle, top = WIDTH / 2, rows * STEP + 0.85
    text = f"{size(sizes.total)} in {counted(sizes.copies, 'copy')}, median {size(sizes.median)}"
    axes.text(
        middle,
        top,
        f"A request of {counted(estimate.tokens, 'token')}",
        ha="center",
        **_text(9, INK),
    )
    axes.text(middle, top - 0.2, text, ha="center", **_text(8, FAINT))
