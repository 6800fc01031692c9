"""Write SVG: boxes, text, arrows. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK = "#1f2328"
FAINT = "#59636e"
RULE = "#8c959f"
PAPER = "#ffffff"
PREFILL, PREFILL_FILL = "#1f5fa8", "#e3eefb"
DECODE, DECODE_FILL = "#1a7346", "#e0f3e8"
THIRD, THIRD_FILL = "#8a5a00", "#fbf0d5"
FAILED, FAILED_FILL = "#a3341f", "#fbe6e1"
NEUTRAL_FILL = "#f1f3f5"

LINE = 1.3
"""Height of a line of text, as a multiple of its size."""

Point = tuple[float, float]


class Drawing:
    """A picture that is put together from shapes, the later ones on top.

    Coordinates are pixels, from the top left corner. The background is white whatever the page
    around it is, so that a dark page shows the picture as a light one does.

    Args:
        width: in pixels.
        height: in pixels.
        title: what the picture shows, for those who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._title = title
        self._shapes: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
        italic: bool = False,
        colour: str = INK,
        code: bool = False,
        halo: bool = False,
    ) -> None:
        """Write text.

        Args:
            x: where the anchor lies.
            y: the baseline of the first line.
            text: its lines.
            size: in pixels.
            anchor: ``start``, ``middle`` or ``end``.
            bold: whether it is bold.
            italic: whether it is italic.
            colour: of the letters.
            code: whether to use letters of one width.
            halo: whether to cover what is below with a white rim.
        """
        style = f'font-size="{_number(size)}" text-anchor="{anchor}" fill="{colour}"'
        style += ' font-weight="600"' if bold else ""
        style += ' font-style="italic"' if italic else ""
        style += ' font-family="ui-monospace, Menlo, Consolas, monospace"' if code else ""
        rim = f' stroke="{PAPER}" stroke-width="4" stroke-linejoin="round"'
        for number, line in enumerate(text.splitlines()):
            at = f'x="{_number(x)}" y="{_number(y + number * size * LINE)}"'
            written = escape(line, quote=False)
            if halo:
                self._shapes.append(f"<text {at} {style}{rim}>{written}</text>")
            self._shapes.append(f"<text {at} {style}>{written}</text>")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = PAPER,
        stroke: str = RULE,
        dashed: bool = False,
        round_: float = 6,
        thick: float = 1.2,
    ) -> None:
        """Draw a rectangle with its top left corner at (x, y)."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._shapes.append(
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" '
            f'height="{_number(height)}" rx="{_number(round_)}" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="{_number(thick)}"{dash}/>'
        )

    def label(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str,
        *,
        small: str = "",
        fill: str = PAPER,
        stroke: str = RULE,
        size: float = 14,
        round_: float = 6,
    ) -> None:
        """Draw a rectangle with text in its middle: bold lines, and ``small`` ones below them."""
        self.box(x, y, width, height, fill=fill, stroke=stroke, round_=round_)
        large, lesser = len(text.splitlines()), len(small.splitlines())
        small_size = size - 2
        rows = (large * size + lesser * small_size) * LINE
        top = y + (height - rows) / 2 + size
        middle = x + width / 2
        self.text(middle, top, text, size=size, anchor="middle", bold=True)
        below = top + (large - 1) * size * LINE + small_size * LINE + 1
        self.text(middle, below, small, size=small_size, anchor="middle", colour=FAINT)

    def line(
        self,
        points: Sequence[Point],
        *,
        colour: str = INK,
        thick: float = 1.3,
        dashed: bool = False,
        arrow: bool = False,
        smooth: bool = False,
    ) -> None:
        """Draw a line through points.

        Args:
            points: at least two; four of a ``smooth`` line.
            colour: of the line.
            thick: in pixels.
            dashed: whether it is dashed.
            arrow: whether its end has a head.
            smooth: whether the two points in the middle are those of a Bezier curve.
        """
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        joints = [f"{_number(x)} {_number(y)}" for x, y in points]
        path = f"M {joints[0]} C {', '.join(joints[1:])}" if smooth else "M " + " L ".join(joints)
        self._shapes.append(
            f'<path d="{path}" fill="none" stroke="{colour}" '
            f'stroke-width="{_number(thick)}"{dash}/>'
        )
        if arrow:
            self._head(points[-2], points[-1], colour, 7 + thick)

    def _head(self, before: Point, tip: Point, colour: str, size: float) -> None:
        """Draw an arrow's head at ``tip``, away from ``before``."""
        (x0, y0), (x1, y1) = before, tip
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1.0
        along, across = (x1 - x0) / length, (y1 - y0) / length
        back = x1 - along * size, y1 - across * size
        half = size * 0.42
        corners = (
            tip,
            (back[0] - across * half, back[1] + along * half),
            (back[0] + across * half, back[1] - along * half),
        )
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)
        self._shapes.append(f'<polygon points="{points}" fill="{colour}"/>')

    def svg(self) -> str:
        """Return the picture as an SVG document."""
        width, height = self._size
        title = escape(self._title, quote=False)
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img" '
                'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
                f"<title>{title}</title>",
                f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
                *self._shapes,
                "</svg>",
                "",
            )
        )


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
