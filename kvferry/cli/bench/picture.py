"""The picture of ``kvferry bench --plot``: speed by block size, compared with memcpy.

This module needs matplotlib. It draws without pyplot, which would look for a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvferry.cli.bench.measure import BenchError, Result
from kvferry.cli.formatting import size

WIDTH, HEIGHT = 5.2, 4.0  # size of a panel in inches


def draw(path: Path, title: str, results: Sequence[Result]) -> None:
    """Write the picture, in the format of the file's suffix, with a panel for each order."""
    orders = sorted({result.case.scattered for result in results}, reverse=True)
    figure = Figure(figsize=(WIDTH * len(orders), HEIGHT), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(orders), sharex=True, sharey=True, squeeze=False)
    for axes, scattered in zip(panels.flat, orders, strict=True):
        found = [r for r in results if r.case.scattered == scattered]
        _panel(axes, found[0].case.order, found)
    figure.legend(
        *panels[0, -1].get_legend_handles_labels(), loc="outside right upper", title="size"
    )
    try:
        with mpl.rc_context({"svg.fonttype": "none"}):  # keep text as text, not outlines
            figure.savefig(path, dpi=150)
    except OSError as exc:
        raise BenchError(f"{path} cannot be written: {exc.strerror}") from exc


def _panel(axes: Axes, title: str, results: Sequence[Result]) -> None:
    sizes = sorted({result.case.size for result in results})
    for number, total in enumerate(sizes):
        rows = sorted((r for r in results if r.case.size == total), key=lambda r: r.case.block)
        blocks = [r.case.block for r in rows]
        colour = mpl.colormaps["viridis"](0.8 * number / max(1, len(sizes) - 1))
        speeds, memcpy = (
            [r.figures()[name] for r in rows] for name in ("gb_per_s", "memcpy_gb_per_s")
        )
        axes.plot(blocks, speeds, "o-", color=colour, label=size(total))
        axes.plot(blocks, memcpy, ":", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    blocks = sorted({result.case.block for result in results})
    axes.set_xticks(blocks, [size(block) for block in blocks])
    axes.set(title=title, xlabel="block", ylabel="GB/s (dotted: memcpy)")
    axes.grid(alpha=0.3)
