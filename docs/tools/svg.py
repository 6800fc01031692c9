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
    """A picture made of shapes; later shapes cover earlier ones.

    All coordinates and lengths are in pixels; coordinates count from the top left corner. The
    background is white, so that the picture looks the same on a dark page.

    Args:
        width: the width of the picture.
        height: the height of the picture.
        title: what the picture shows, for people who cannot see it.
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
        """Write text of one or several lines.

        Args:
            x: the x coordinate of the anchor of each line.
            y: the y coordinate of the first line's baseline.
            text: the text; newlines separate its lines.
            size: the size of the letters.
            anchor: which point of a line lies at ``x``: ``start``, ``middle`` or ``end``.
            bold: whether the letters are bold.
            italic: whether the letters are italic.
            colour: the colour of the letters.
            code: whether to use a font in which all letters have the same width.
            halo: whether to give the letters a white rim, which covers shapes below them.
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
        """Draw a rectangle.

        Args:
            x: the x coordinate of the top left corner.
            y: the y coordinate of the top left corner.
            width: the width of the rectangle.
            height: the height of the rectangle.
            fill: the colour of its area.
            stroke: the colour of its edge.
            dashed: whether the edge is dashed.
            round_: the radius of the corners.
            thick: the thickness of the edge.
        """
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
        """Draw a rectangle with text in its middle.

        Args:
            x: the x coordinate of the top left corner.
            y: the y coordinate of the top left corner.
            width: the width of the rectangle.
            height: the height of the rectangle.
            text: the text, in bold; newlines separate its lines.
            small: further text, in smaller letters below ``text``.
            fill: the colour of the rectangle's area.
            stroke: the colour of its edge.
            size: the size of the letters of ``text``.
            round_: the radius of the corners.
        """
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
            points: at least two points, as (x, y); four of them for a ``smooth`` line.
            colour: the colour of the line.
            thick: the thickness of the line.
            dashed: whether the line is dashed.
            arrow: whether the line ends with an arrow's head.
            smooth: whether to draw a cubic Bezier curve, of which the two points in the middle are
                the control points.
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
        """Draw the head of an arrow.

        Args:
            before: the arrow comes from this point.
            tip: the tip of the head.
            colour: the colour of the head.
            size: the length of the head.
        """
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
    """Return a coordinate or a length as text, with one decimal unless that is 0."""
    return f"{value:.1f}".removesuffix(".0")
