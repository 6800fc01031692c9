"""Draw the pictures of this documentation: ``python -m docs.tools.pictures``.

What the pictures claim about the code is in tables here (``LOAD``, ``HOLD``, ``HOLD_REPORTED``,
``EXAMPLE``, ``READS``, ``COPIES``), and ``tests/docs/test_pictures.py`` compares the tables with
the code. Its tests fail, too, if a file in ``docs/pictures`` differs from what this script draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from docs.tools.svg import (
    DECODE,
    DECODE_FILL,
    FAILED,
    FAILED_FILL,
    FAINT,
    INK,
    NEUTRAL_FILL,
    PREFILL,
    PREFILL_FILL,
    RULE,
    THIRD,
    THIRD_FILL,
    Drawing,
)

FOLDER = Path(__file__).resolve().parent.parent / "pictures"

LOAD: Mapping[tuple[str, str], str] = {
    ("handshake", "read"): "the ticket says “computed”",
    ("handshake", "check"): "otherwise",
    ("handshake", "failed"): "no handshake, ticket refused, or given up",
    ("check", "read"): "the word says ready",
    ("check", "wait"): "still computing",
    ("wait", "check"): "ask again",
    ("read", "fence"): "all data has arrived",
    ("fence", "received"): "the word still names the hold",
    ("check", "winding down"): "another word: stale",
    ("wait", "winding down"): "deadline, or given up",
    ("read", "winding down"): "the transfer fails",
    ("fence", "winding down"): "another word: stale",
    ("winding down", "failed"): "no byte can land any more",
}
"""When a load that reads from one producer rank changes its state, by (state, next state)."""

HOLD: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("free", "computing"): ("take on",),
    ("computing", "free"): ("drop", "done", "abandon"),
    ("computing", "ticketed"): ("ticket",),
    ("ticketed", "ready"): ("passed",),
    ("ready", "ready"): ("renew",),
    ("ticketed", "free"): ("done", "abandon", "expire", "give up"),
    ("ready", "free"): ("done", "abandon", "expire", "give up"),
}
"""The events that change the state of a hold on a prefill rank, by (state, next state).

"ticket" is the order that tells the rank of the ticket; the scheduler made the ticket before.
"""

HOLD_REPORTED = frozenset({"done", "abandon", "expire", "give up"})
"""The events that end a hold and have its request reported as sent: at once, or with the order if
it is still being computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The hand-over that the pictures of the planner show: the K of one layer.

    Attributes:
        heads: how many KV heads the model has.
        prefill: for each prefill rank, its first head and the head after its last.
        decode: likewise for each decode rank.
        prefill_block: how many tokens a page has on prefill.
        decode_block: how many tokens a page has on decode.
        prefill_pages: the ids of the request's pages on prefill.
        decode_pages: the ids of the request's pages on decode.
        tokens: how many tokens are handed over.
        read: how many tokens are read: ``tokens``, rounded up to a whole sub-block.
        sub_block: how many tokens a sub-block has: the most that lie in one page on both sides.
    """

    heads: int
    prefill: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, int], ...]
    prefill_block: int
    decode_block: int
    prefill_pages: tuple[int, ...]
    decode_pages: tuple[int, ...]
    tokens: int
    read: int
    sub_block: int


EXAMPLE = Example(
    heads=6,
    prefill=((0, 3), (3, 6)),
    decode=((0, 2), (2, 4), (4, 6)),
    prefill_block=4,
    decode_block=6,
    prefill_pages=(7, 2, 5),
    decode_pages=(3, 1),
    tokens=9,
    read=10,
    sub_block=2,
)

READS: Mapping[tuple[int, int], tuple[int, int]] = {
    (0, 0): (0, 2),
    (1, 0): (2, 3),
    (1, 1): (3, 4),
    (2, 1): (4, 6),
}
"""By (decode rank, prefill rank): the first head that the decode rank reads from the prefill rank,
and the head after the last."""

DONE_EXPECTED = (2, 2)
"""For each prefill rank, how many decode ranks read from it: it waits for that many "done"."""

COPIES: Mapping[tuple[str, str], tuple[int, int]] = {
    ("HND", "NHD"): (4, 1),
    ("HND", "HND"): (2, 2),
    ("NHD", "NHD"): (2, 2),
}
"""By the order of a page's dimensions on prefill and on decode: with how many copies decode rank 0
reads a sub-block from prefill rank 0, and how many cells each copy has. A cell is one head of one
token."""


# One request.

LIFELINES = (
    ("router", RULE),
    ("prefill\nscheduler", PREFILL),
    ("prefill\nworker", PREFILL),
    ("decode\nworker", DECODE),
    ("decode\nscheduler", DECODE),
)
COLUMNS = (54, 190, 364, 560, 726)
ROUTER, PREFILL_S, PREFILL_W, DECODE_W, DECODE_S = range(5)


class _Sequence:
    """The arrows and notes of the sequence diagram, which are drawn from top to bottom.

    Participants are given by their index in ``LIFELINES``.

    Args:
        drawing: the picture to draw into.
        top: the y coordinate below which the first of them goes.

    Attributes:
        y: the y coordinate at which the last of them ends.
    """

    def __init__(self, drawing: Drawing, top: float) -> None:
        self.drawing = drawing
        self.y = top

    def message(
        self,
        source: int,
        target: int,
        text: str,
        *,
        data: bool = False,
        reply: bool = False,
        gap: float = 14,
    ) -> None:
        """Draw a message: an arrow between two participants, with text above it.

        Args:
            source: the participant that the arrow comes from.
            target: the participant that the arrow leads to.
            text: the text; newlines separate its lines.
            data: whether the message carries pages: the arrow is thick and coloured.
            reply: whether the message is an answer: the arrow is dashed.
            gap: the free space above the text, in pixels.
        """
        lines = len(text.splitlines())
        self.y += gap + lines * 12 * 1.3
        start, end = COLUMNS[source], COLUMNS[target]
        shift = 5 if end > start else -5
        self.drawing.text(
            (start + end) / 2,
            self.y - 6 - (lines - 1) * 12 * 1.3,
            text,
            size=12,
            anchor="middle",
            halo=True,
        )
        colour = DECODE if data else INK
        self.drawing.line(
            [(start + shift, self.y), (end - shift, self.y)],
            colour=colour,
            thick=3 if data else 1.3,
            dashed=reply,
            arrow=True,
        )

    def note(self, at: int, text: str, *, width: float = 174, gap: float = 10) -> None:
        """Draw a box that says what a participant does by itself.

        Args:
            at: the participant.
            text: the text; newlines separate its lines.
            width: the width of the box, in pixels.
            gap: the free space above the box, in pixels.
        """
        rows = len(text.splitlines())
        height = rows * 12 * 1.3 + 9
        self.y += gap
        x = min(max(COLUMNS[at] - width / 2, 6), 794 - width)
        fill = NEUTRAL_FILL if at == ROUTER else PREFILL_FILL if at < DECODE_W else DECODE_FILL
        self.drawing.box(x, self.y, width, height, fill=fill, stroke=LIFELINES[at][1], round_=4)
        self.drawing.text(x + width / 2, self.y + 16, text, size=12, anchor="middle")
        self.y += height


def request() -> str:
    """Return, as SVG, one request from the end of its prefill to the release of its pages."""
    height = 1138
    drawing = Drawing(800, height, "One request, from the end of prefill to the release of pages")
    for (name, colour), x in zip(LIFELINES, COLUMNS, strict=True):
        drawing.line([(x, 60), (x, height - 14)], colour=RULE, dashed=True, thick=1)
        fill = (
            NEUTRAL_FILL if colour == RULE else PREFILL_FILL if colour == PREFILL else DECODE_FILL
        )
        drawing.label(x - 48, 14, 96, 46, name, fill=fill, stroke=colour, size=13)
    rows = _Sequence(drawing, 66)
    rows.note(PREFILL_W, "slot word: computing,\nsince the request was\ntaken on")
    rows.note(
        PREFILL_S,
        "vLLM: request_finished.\nMakes and proves the ticket;\nkeeps the blocks",
        width=184,
    )
    rows.message(PREFILL_S, ROUTER, "ticket")
    rows.message(ROUTER, DECODE_S, "request with the ticket", gap=8)
    rows.note(DECODE_S, "checks form and\nprompt digest", width=148)
    rows.message(DECODE_S, DECODE_W, "ticket", gap=8)
    rows.message(DECODE_W, PREFILL_S, "handshake over the side channel, once per engine")
    rows.message(
        PREFILL_S,
        DECODE_W,
        "layouts of all ranks, lease, key that proves tickets",
        reply=True,
        gap=6,
    )
    rows.note(
        DECODE_W,
        "checks that the engines fit,\nplans who reads what,\nverifies the proof,\n"
        "connects, reads the fingerprint",
        width=212,
    )
    rows.message(DECODE_W, PREFILL_W, "renewals until the fence,\na heartbeat every second")
    rows.note(DECODE_S, "blocks are allocated", width=148, gap=14)
    rows.message(DECODE_S, DECODE_W, "load: tokens, pages", gap=8)
    rows.note(DECODE_W, "zeroes what no read writes,\ncomputes the copies", width=190)
    rows.message(PREFILL_W, DECODE_W, "read: the pages, one-sided", data=True)
    rows.message(PREFILL_S, PREFILL_W, "hold, lease: a step later,\noften after the fence")
    rows.note(
        PREFILL_W,
        "the lease starts; when the\ndevice has done all work:\nslot word := ready,\n"
        "the lease starts anew",
    )
    rows.note(DECODE_W, "all data of this\nrank has arrived", width=150)
    rows.message(PREFILL_W, DECODE_W, "fence: slot word, one-sided", data=True)
    rows.message(DECODE_W, PREFILL_W, "“done”, bound to that read", gap=8)
    rows.note(DECODE_W, "the word names this hold:\nthe pages were held throughout", width=212)
    rows.message(DECODE_W, DECODE_S, "received", gap=8)
    rows.note(DECODE_S, "all ranks have reported:\ndecode goes on", width=158)
    rows.note(PREFILL_W, "“done” from every rank that\nreads: slot word := 0", width=190, gap=8)
    rows.message(PREFILL_W, PREFILL_S, "sent", gap=8)
    rows.note(PREFILL_S, "all workers have said so:\nvLLM frees the blocks")
    if rows.y > height - 14:
        raise ValueError(f"the sequence ends at {rows.y:.0f}, below the picture of {height}")
    return drawing.svg()


# States.


def load() -> str:
    """Return, as SVG, the states of a load."""
    drawing = Drawing(800, 452, "States of a load")
    drawing.label(
        18, 100, 122, 58, "Handshake", small="once per engine", fill=DECODE_FILL, stroke=DECODE
    )
    drawing.box(196, 18, 440, 222, dashed=True, fill="#fafbfc")
    drawing.text(208, 38, "for each prefill rank that this rank reads from", size=12, colour=FAINT)
    for x, y, width, height, name, small in (
        (214, 162, 132, 54, "Check", "reads the slot word"),
        (372, 162, 104, 54, "Wait", "a moment"),
        (372, 66, 104, 66, "Read", "reads the pages"),
        (520, 66, 104, 66, "Fence", "reads the word,\nsays “done”"),
    ):
        drawing.label(x, y, width, height, name, small=small, fill=DECODE_FILL, stroke=DECODE)
    drawing.line([(140, 116), (180, 99), (372, 99)], arrow=True)
    drawing.text(252, 92, LOAD["handshake", "read"], size=12, anchor="middle", halo=True)
    drawing.line([(140, 146), (170, 180), (214, 180)], arrow=True)
    drawing.text(152, 200, LOAD["handshake", "check"], size=12)
    drawing.line([(300, 162), (372, 121)], arrow=True)
    drawing.text(348, 150, LOAD["check", "read"], size=12)
    drawing.line([(346, 180), (372, 180)], arrow=True)
    drawing.line([(372, 202), (346, 202)], arrow=True)
    drawing.text(359, 232, "still computing: ask again", size=12, anchor="middle", halo=True)
    drawing.line([(476, 99), (520, 99)], arrow=True)
    drawing.text(498, 58, LOAD["read", "fence"], size=12, anchor="middle", halo=True)
    drawing.label(
        668,
        57,
        118,
        84,
        "Received",
        small="decode goes on\nwhen all its ranks\nhave reported",
        fill=DECODE_FILL,
        stroke=DECODE,
    )
    drawing.line([(624, 99), (668, 99)], arrow=True)
    drawing.text(
        727,
        160,
        "the word still names\nthe hold, on each of\nthese prefill ranks",
        size=12,
        anchor="middle",
    )
    drawing.label(
        300,
        320,
        236,
        76,
        "Winding down",
        small="transfers under way are cancelled;\nnothing new is posted",
        fill=FAILED_FILL,
        stroke=FAILED,
    )
    drawing.line([(418, 240), (418, 320)], arrow=True, colour=FAILED)
    drawing.text(
        430,
        262,
        "the word is another one (stale), a transfer fails,\n"
        "the deadline passes, the engine gives the load up",
        size=12,
        halo=True,
    )
    drawing.label(
        646,
        308,
        144,
        100,
        "Failed",
        small="“abandon” is said\nif prefill is connected;\nvLLM recomputes\nor fails",
        fill=FAILED_FILL,
        stroke=FAILED,
    )
    drawing.line([(536, 358), (646, 358)], arrow=True, colour=FAILED)
    drawing.text(591, 330, "no byte can\nland any more", size=12, anchor="middle", halo=True)
    drawing.line([(79, 158), (79, 430), (719, 430), (719, 408)], arrow=True, colour=FAILED)
    drawing.text(
        90,
        300,
        "no handshake, ticket refused,\nor given up before:\nnothing is under way",
        size=12,
        halo=True,
    )
    return drawing.svg()


def hold() -> str:
    """Return, as SVG, the states of a hold on one rank of prefill."""
    drawing = Drawing(800, 356, "States of a hold on one rank of prefill")
    for x, name, word, fill, stroke in (
        (18, "Free", "word: 0", NEUTRAL_FILL, RULE),
        (202, "Computing", "word: computing", PREFILL_FILL, PREFILL),
        (402, "Ticketed", "word: computing\nthe lease runs", PREFILL_FILL, PREFILL),
        (652, "Ready", "word: ready\nthe lease runs", PREFILL_FILL, PREFILL),
    ):
        drawing.label(x, 96, 132, 74, name, small=word, fill=fill, stroke=stroke)
    for start, end, text in (
        (150, 202, "take on"),
        (334, 402, "hears of\nthe ticket"),
        (534, 652, "the device has\ndone all work"),
    ):
        drawing.line([(start, 133), (end, 133)], arrow=True)
        lines = text.count("\n")
        drawing.text((start + end) / 2, 118 - lines * 16, text, size=12, anchor="middle", halo=True)
    drawing.line([(694, 96), (674, 34), (762, 34), (742, 96)], smooth=True, arrow=True)
    drawing.text(790, 30, "renewal: the lease starts anew", size=12, anchor="end")
    drawing.line([(244, 170), (244, 206), (110, 206), (110, 170)], arrow=True)
    drawing.text(
        177,
        226,
        "drop: the request ends\nwithout a ticket;\nnothing is reported",
        size=12,
        anchor="middle",
        halo=True,
    )
    ends = {"computing": 292, "ticketed": 468, "ready": 718}
    for (state, after), events in HOLD.items():
        if after == "free" and not HOLD_REPORTED.isdisjoint(events):
            drawing.line([(ends[state], 170), (ends[state], 286)])
    drawing.line([(ends["ready"], 286), (62, 286), (62, 170)], arrow=True)
    drawing.text(302, 232, "“done” or “abandon”\ncame before the order", size=12)
    drawing.text(
        400,
        310,
        "over: from one decode engine, every rank that reads here has said “done” or “abandon”;\n"
        "or, not in Computing: the lease has ended, or prefill gives the hold up.\n"
        "First the word becomes 0, then the request is reported sent, once "
        "(from Computing: with the order).",
        size=12,
        anchor="middle",
    )
    return drawing.svg()


# The whole.


def overview() -> str:
    """Return, as SVG, two engines and what passes between them."""
    drawing = Drawing(800, 282, "A prefill engine hands its KV cache to a decode engine")
    for x, name, kind, fill, stroke in (
        (18, "Prefill engine", "TP 2, HND, blocks of 16 tokens", PREFILL_FILL, PREFILL),
        (542, "Decode engine", "TP 1, NHD, blocks of 32 tokens", DECODE_FILL, DECODE),
    ):
        drawing.box(x, 60, 240, 204, fill=fill, stroke=stroke)
        drawing.text(x + 120, 84, name, size=15, anchor="middle", bold=True)
        drawing.text(x + 120, 103, kind, size=12, anchor="middle", colour=FAINT)
        drawing.label(x + 16, 116, 208, 32, "scheduler", small="", stroke=stroke, size=13)
    for y, name in ((158, "worker 0, KV cache"), (210, "worker 1, KV cache")):
        drawing.label(34, y, 208, 42, name, stroke=PREFILL, size=13)
    drawing.label(558, 158, 208, 94, "worker 0, KV cache", stroke=DECODE, size=13)
    drawing.label(336, 14, 128, 34, "router", stroke=RULE, fill=NEUTRAL_FILL, size=13)
    drawing.line([(138, 60), (138, 31), (336, 31)], arrow=True)
    drawing.line([(464, 31), (662, 31), (662, 60)], arrow=True)
    drawing.text(400, 68, "ticket: which pages, and where", size=12, anchor="middle")
    for y in (179, 231):
        drawing.line([(242, y), (558, y)], arrow=True, colour=DECODE, thick=3)
    drawing.text(400, 170, "one-sided reads of pages, then a fence", size=12, anchor="middle")
    drawing.text(400, 222, "loopback · nixl · ucx · yours", size=12, anchor="middle", colour=FAINT)
    drawing.line([(542, 140), (258, 140)], arrow=True, dashed=True)
    drawing.text(400, 132, "handshake: layouts", size=12, anchor="middle")
    return drawing.svg()


def icon() -> str:
    """Return, as SVG, the icon of the site: pages that go from one engine to another."""
    drawing = Drawing(32, 32, "kvferry")
    drawing.box(2, 8, 9, 16, fill=PREFILL, stroke=PREFILL, round_=2)
    drawing.box(21, 8, 9, 16, fill=DECODE, stroke=DECODE, round_=2)
    drawing.line([(11, 16), (21, 16)], colour=INK, thick=2)
    return drawing.svg()


# The planner.

RANK_COLOURS = ((PREFILL, PREFILL_FILL), (THIRD, THIRD_FILL))
"""For each of the two prefill ranks, its colours: stroke and fill."""


def ranks() -> str:
    """Return, as SVG, which decode rank of the example reads which heads from which rank."""
    drawing = Drawing(800, 300, "Which decode rank reads which heads from which prefill rank")
    drawing.text(150, 28, "prefill, TP 2", anchor="middle", bold=True)
    drawing.text(650, 28, "decode, TP 3", anchor="middle", bold=True)
    cell = 44

    def row(x: float, y: float, heads: tuple[int, int]) -> None:
        for index, head in enumerate(range(*heads)):
            stroke, fill = RANK_COLOURS[_holder(head)]
            drawing.label(
                x + index * cell, y, cell - 4, 34, f"h{head}", fill=fill, stroke=stroke, size=13
            )

    prefill_y, decode_y = (72, 196), (48, 134, 220)
    for rank, heads in enumerate(EXAMPLE.prefill):
        drawing.text(70, prefill_y[rank] + 22, f"rank {rank}", anchor="end")
        row(84, prefill_y[rank], heads)
        drawing.text(
            84,
            prefill_y[rank] + 54,
            f"waits for {DONE_EXPECTED[rank]} “done”",
            size=12,
            colour=FAINT,
        )
    for rank, heads in enumerate(EXAMPLE.decode):
        row(600, decode_y[rank], heads)
        drawing.text(702, decode_y[rank] + 22, f"rank {rank}")
    for (reader, source), (first, last) in READS.items():
        left = 84 + (last - EXAMPLE.prefill[source][0]) * cell
        right = 600 + (first - EXAMPLE.decode[reader][0]) * cell
        start = (max(left, 84 + 3 * cell), prefill_y[source] + 17)
        middle = decode_y[reader] + 17 + (0 if first == EXAMPLE.decode[reader][0] else 10)
        if reader == 1:
            middle = decode_y[reader] + (9 if source == 0 else 27)
        stroke, _ = RANK_COLOURS[source]
        end = (min(right, 600) - 4, middle)
        drawing.line([start, end], colour=stroke, thick=2, arrow=True)
        name = f"head {first}" if last - first == 1 else f"heads {first} to {last - 1}"
        at = 0.55
        drawing.text(
            start[0] + (end[0] - start[0]) * at,
            start[1] + (end[1] - start[1]) * at - 6,
            name,
            size=12,
            anchor="middle",
            halo=True,
        )
    return drawing.svg()


def tokens() -> str:
    """Return, as SVG, how the example's tokens lie in the pages of prefill and of decode."""
    drawing = Drawing(800, 262, "How the tokens of a request lie in the pages of both sides")
    left, cell = 128, 52
    last = len(EXAMPLE.decode_pages) * EXAMPLE.decode_block
    rows = (
        ("prefill", 44, EXAMPLE.prefill_block, EXAMPLE.prefill_pages, PREFILL, PREFILL_FILL),
        ("decode", 168, EXAMPLE.decode_block, EXAMPLE.decode_pages, DECODE, DECODE_FILL),
    )
    for name, y, block, pages, stroke, fill in rows:
        drawing.text(left - 14, y + 24, name, anchor="end", bold=True)
        drawing.text(left - 14, y + 40, f"pages of {block}", size=12, anchor="end", colour=FAINT)
        for number, page in enumerate(pages):
            x = left + number * block * cell
            drawing.box(x + 1, y - 22, block * cell - 2, 74, stroke=stroke, fill="#fafbfc")
            drawing.text(x + 8, y - 7, f"page {page}", size=12, colour=stroke, bold=True)
            for token in range(number * block, (number + 1) * block):
                shade = _token_fill(token, name, fill)
                edge = FAILED if shade == FAILED_FILL else RULE
                x = left + token * cell
                drawing.label(
                    x + 5, y, cell - 10, 42, f"t{token}", fill=shade, stroke=edge, size=13
                )
    y = 112
    for number, start in enumerate(range(0, EXAMPLE.read, EXAMPLE.sub_block)):
        x = left + start * cell
        width = EXAMPLE.sub_block * cell
        drawing.line([(x + 6, y), (x + width - 6, y)], thick=3, colour=DECODE)
        drawing.text(x + width / 2, y + 16, f"sub-block {number}", size=12, anchor="middle")
        drawing.line([(x + width / 2, y + 21), (x + width / 2, 144)], colour=DECODE, arrow=True)
    x = left + EXAMPLE.read * cell
    zeroed = (last - EXAMPLE.read) * cell
    drawing.text(
        x + zeroed / 2, y + 12, "not read:\nzeroed", size=12, anchor="middle", colour=FAILED
    )
    drawing.text(
        left,
        246,
        f"The request has {EXAMPLE.tokens} tokens. Token {EXAMPLE.tokens} is read too, "
        "because it ends a sub-block; decode overwrites it.",
        size=12,
        colour=FAINT,
    )
    return drawing.svg()


def _token_fill(token: int, side: str, fill: str) -> str:
    """Return the colour of a token's cell.

    Args:
        token: the index of the token in the request.
        side: ``prefill`` or ``decode``.
        fill: the colour of tokens that are handed over.
    """
    if token < EXAMPLE.tokens:
        return fill
    if token < EXAMPLE.read:
        return NEUTRAL_FILL
    return FAILED_FILL if side == "decode" else NEUTRAL_FILL


def copies() -> str:
    """Return, as SVG, the copies of one sub-block, for each pair of orders in ``COPIES``."""
    drawing = Drawing(800, 520, "The copies of one sub-block, by the order of heads and tokens")
    prefill, decode = EXAMPLE.prefill[0], EXAMPLE.decode[0]
    for number, ((far, near), (count, cells)) in enumerate(COPIES.items()):
        top = 18 + number * 168
        what = "copies of one cell" if cells == 1 else f"copies of {cells} cells"
        drawing.text(20, top + 14, f"{far} to {near}", bold=True, size=14)
        drawing.text(128, top + 14, f"{count} {what}", size=13)
        source = _places(far, prefill, EXAMPLE.prefill_block)
        target = _places(near, decode, EXAMPLE.decode_block)
        _strip(drawing, top + 30, "prefill rank 0, page 7", source, PREFILL)
        _strip(drawing, top + 114, "decode rank 0, page 3", target, DECODE)
        runs = _runs(source, target)
        if (len(runs), len(runs[0])) != (count, cells):
            raise ValueError(f"{far} to {near} takes {len(runs)} copies, and COPIES says {count}")
        for run in runs:
            ends = []
            for places, y in ((source, top + 30), (target, top + 114)):
                x = 180 + places.index(run[0]) * _CELL
                drawing.box(
                    x - 1, y, len(run) * _CELL + 2, 40, fill="none", stroke=DECODE, thick=2.2
                )
                ends.append(x + len(run) * _CELL / 2)
            drawing.line(
                [(ends[0], top + 72), (ends[1], top + 112)], colour=DECODE, arrow=True, thick=1.8
            )
    return drawing.svg()


Cell = tuple[int, int]
"""A head and a token, by their indices."""


def _places(order: str, heads: tuple[int, int], block: int) -> list[Cell]:
    """Return the cells of a page in the order of their addresses.

    Args:
        order: ``HND`` if the tokens of a head lie together, ``NHD`` if the heads of a token do.
        heads: the rank's first head, and the head after its last.
        block: how many tokens the page has.
    """
    if order == "HND":
        return [(head, token) for head in range(*heads) for token in range(block)]
    return [(head, token) for token in range(block) for head in range(*heads)]


def _is_moved(cell: Cell) -> bool:
    """Return whether decode rank 0 reads this cell from prefill rank 0 with sub-block 0."""
    first, last = READS[0, 0]
    return first <= cell[0] < last and cell[1] < EXAMPLE.sub_block


def _runs(source: list[Cell], target: list[Cell]) -> list[list[Cell]]:
    """Group the cells that are moved into runs, each of which is contiguous on both sides.

    Args:
        source: the cells of the page that is read, in the order of their addresses.
        target: the cells of the page that is written, likewise.

    Returns:
        The cells of each run, in order. A run is one copy.
    """
    runs: list[list[Cell]] = []
    for cell in filter(_is_moved, source):
        last = runs[-1][-1] if runs else None
        if last and all(side.index(cell) == side.index(last) + 1 for side in (source, target)):
            runs[-1].append(cell)
        else:
            runs.append([cell])
    return runs


_CELL = 47.0
"""Width of a cell in the picture."""


def _strip(drawing: Drawing, y: float, name: str, cells: list[Cell], stroke: str) -> None:
    """Draw the memory of one page, cell by cell in the order of addresses.

    Args:
        drawing: the picture to draw into.
        y: the y coordinate of the cells' upper edge.
        name: the text to the left of the cells.
        cells: the cells of the page.
        stroke: the colour of the edges of cells that are moved.
    """
    drawing.text(168, y + 24, name.replace(", ", "\n"), size=12, anchor="end", colour=FAINT)
    for index, cell in enumerate(cells):
        fill = DECODE_FILL if _is_moved(cell) else NEUTRAL_FILL
        edge = stroke if _is_moved(cell) else RULE
        x = 180 + index * _CELL
        drawing.box(x + 1, y + 2, _CELL - 2, 36, fill=fill, stroke=edge, round_=3)
        drawing.text(
            x + _CELL / 2,
            y + 25,
            f"h{cell[0]} t{cell[1]}",
            size=12,
            anchor="middle",
            colour=INK if _is_moved(cell) else FAINT,
        )


def _holder(head: int) -> int:
    """Return the index of the prefill rank that has a head."""
    return next(i for i, (first, last) in enumerate(EXAMPLE.prefill) if first <= head < last)


PICTURES: Mapping[str, Callable[[], str]] = {
    "icon.svg": icon,
    "overview.svg": overview,
    "request.svg": request,
    "load.svg": load,
    "hold.svg": hold,
    "planner-ranks.svg": ranks,
    "planner-tokens.svg": tokens,
    "planner-copies.svg": copies,
}
"""For each picture, by its file name: the function that returns it as SVG."""


def main() -> None:
    """Draw every picture, and write it to ``docs/pictures``."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
