"""The picture of ``kvferry plan --svg``: lines from prefill ranks to decode ranks.

This module needs matplotlib. It draws without pyplot, which would look for a display.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from kvferry.cli.formatting import counted, size
from kvferry.cli.plan.engines import EngineError
from kvferry.cli.plan.estimate import figures
from kvferry.cli.plan.report import PlanResult, contents_of

# In inches: from one rank to the next, of the picture, and from its edge to where lines end.
STEP, WIDTH, EDGE = 0.62, 10.0, 3.0
THICKEST = 24.0  # width of the line of the read with the most bytes, in points
LONGEST = 56  # characters of a line of text


def draw_svg(path: Path, result: PlanResult) -> None:
    """Draw which rank reads from which, as lines whose width is the number of bytes."""
    estimate, sides = result.estimate, (result.prefill, result.decode)
    rows = max(len(side.engine.ranks) for side in sides)
    figure = Figure(figsize=(WIDTH, (rows + 2) * STEP))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(-STEP, (rows + 1) * STEP))
    axes.axis("off")
    total = f"{size(estimate.total['bytes'])} in {counted(estimate.total['copies'], 'copy')}"
    title = f"A request of {counted(estimate.tokens, 'token')}: {total}"
    axes.text(WIDTH / 2, (rows + 0.6) * STEP, title, ha="center", fontsize=9)
    heights = []
    for side, x, align in zip(sides, (0.2, WIDTH - 0.2), ("left", "right"), strict=True):
        text = partial(axes.text, x, ha=align, va="center", parse_math=False)
        text((rows + 0.3) * STEP, f"{side.name}  {side.source}"[:LONGEST], fontsize=9)
        of_rank = estimate.of_prefill if side is result.prefill else estimate.of_decode
        count = len(side.engine.ranks)
        heights.append([rows * STEP * (1 - (rank + 0.5) / count) for rank in range(count)])
        for rank, (layout, y) in enumerate(zip(side.engine.ranks, heights[-1], strict=True)):
            nbytes = figures(of_rank(rank))["bytes"]
            held = contents_of((f.key, f.shard_range) for f in layout.fields)
            text(y + 0.1, f"{side.name} {side.rank_name(rank)}", fontsize=8)
            text(y - 0.1, f"{size(nbytes) if nbytes else 'not read'}; {held}"[:LONGEST], fontsize=7)
    last = max(1, len(heights[0]) - 1)
    most = max((figures([read])["bytes"] for read in estimate.reads), default=1)
    for read in estimate.reads:
        axes.plot(
            (EDGE, WIDTH - EDGE),
            (heights[0][read.prefill], heights[1][read.decode]),
            color=mpl.colormaps["viridis"](0.06 + 0.76 * read.prefill / last),
            linewidth=THICKEST * figures([read])["bytes"] / most,
            alpha=0.55,
            solid_capstyle="butt",
        )
    # Keep text as text, for search and screen readers, and make equal files from equal plans.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvferry"}):
        try:
            figure.savefig(path, format="svg", metadata={"Date": None, "Title": "kvferry plan"})
        except OSError as exc:
            raise EngineError(f"{path} cannot be written: {exc.strerror}") from exc
