"""The plots of the page of ``make bench``: for each section, every ratio with its interval."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
import rows
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FEWEST = 6
"""Rows of a section, of which a plot says more than its table."""

WIDTH, ROW, EDGES = 7.5, 0.24, 1.0
"""Inches: of a plot, of a line of it, and of what is above and below."""

COLOURS = {True: "tab:green", False: "tab:red", None: "tab:gray"}
SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "kvferry", "font.size": 8}
"""Text stays text; and the same figures give the same file."""


def draw_all(folder: Path, parts: Mapping[str, Mapping[str, Sequence[rows.Row]]]) -> dict[str, str]:
    """Draw all sections of all parts that have enough rows, and remove what is there otherwise.

    Returns:
        The file of each section, as seen from the folder's parent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, str] = {}
    for part, sections in parts.items():
        for section, own in sections.items():
            if len(own) >= FEWEST:
                file = folder / f"{_slug(part)}-{_slug(section)}.svg"
                draw(file, section, own)
                found[section] = f"{folder.name}/{file.name}"
    drawn = {Path(name).name for name in found.values()}
    for file in folder.glob("*.svg"):
        if file.name not in drawn:
            file.unlink()
    return found


def draw(path: Path, title: str, found: Sequence[rows.Row]) -> None:
    """A panel for each thing that the ratios are to, a line for each row."""
    ordered = sorted(found, key=lambda row: row.of)
    panels = [(of, list(group)) for of, group in groupby(ordered, key=lambda row: row.of)]
    heights = [len(group) + 3 for _, group in panels]
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, ROW * sum(heights) + EDGES), layout="constrained")
        figure.suptitle(title)
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for panel, (of, group) in zip(axes.flat, panels, strict=True):
            _panel(panel, of, group)
        figure.savefig(path, metadata={"Date": None})


def _panel(axes: Axes, of: str, found: Sequence[rows.Row]) -> None:
    for place, row in enumerate(found):
        colour = COLOURS[row.met]
        axes.plot([row.low, row.high], [place, place], color=colour, linewidth=2, alpha=0.5)
        axes.plot([row.ratio], [place], "o", color=colour, markersize=4)
        if row.target:
            axes.plot([float(row.target[2:])], [place], "|", color="black", markersize=10)
    axes.axvline(1.0, color="black", linewidth=0.6, linestyle=":")
    if all(row.low > 0 for row in found):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(found)), [row.case for row in found])
    axes.set(xlabel=f"ratio to {of} (a stroke: the target)", ylim=(len(found) - 0.5, -0.5))
    axes.grid(axis="x", alpha=0.3)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
