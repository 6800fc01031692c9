"""The examples of ``docs/planner.md`` are what the planner does; its table of engines adds up."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.core.layout import Layout
from kvferry.core.planner.build_copies import Pages, ReadRequest, build_copies
from kvferry.core.planner.plan import Plan, make_plan
from kvferry.core.planner.unwritten import unwritten_spans
from tests.core.layouts import DIM, heads, layout, paged

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planner.md").read_text()

PREFILL, PREFILL_BLOCK = ((0, 3), (3, 6)), 4
DECODE, DECODE_BLOCK = ((0, 2), (2, 4), (4, 6)), 6
TOKENS, SUB_BLOCK = 9, 2


def engine(shards: tuple[tuple[int, int], ...], block: int, order: str) -> list[Layout]:
    """Return the layouts of an engine with one rank for each range of heads."""
    return [
        layout(heads(shard=shard, block=block, order=order), groups=[paged(block)])
        for shard in shards
    ]


def plan(rank: int, far: str = "HND", near: str = "NHD") -> tuple[Plan, Layout]:
    """Return a decode rank's plan for these orders, and its layout."""
    ours = engine(DECODE, DECODE_BLOCK, near)
    return make_plan(ours, engine(PREFILL, PREFILL_BLOCK, far), rank), ours[rank]


def token_row(name: str) -> list[str]:
    """Return a row of the picture of tokens, without its name."""
    found = re.search(rf"^{name} +(.*)$", PAGE, re.MULTILINE)
    assert found is not None
    return found[1].split()


def read_request(tokens: int) -> ReadRequest:
    local, remote = (
        Pages(ids=np.array(list(dict.fromkeys(map(int, token_row(f"{side} page"))))))
        for side in ("decode", "prefill")
    )
    return ReadRequest(ranges=((0, tokens),), local=(local,), remote=(remote,))


def test_each_rank_reads_what_the_table_says() -> None:
    shown = re.findall(r"^\| (\d) \| (heads? .*|) ?\| (heads? .*|) ?\|$", PAGE, re.MULTILINE)
    assert len(shown) == len(DECODE)
    for reader, *cells in shown:
        found, _ = plan(int(reader))
        read = {source.remote: source.matches[0].overlaps[0].shard for source in found.sources}
        numbers = [[int(head) for head in re.findall(r"\d", cell)] for cell in cells]
        assert read == {rank: (n[0], n[-1] + 1) for rank, n in enumerate(numbers) if n}
        assert found.notifiers == (2, 2)


def test_sub_blocks_and_zeroed_tokens_are_those_of_the_picture() -> None:
    found, ours = plan(0)
    [pairing] = [match.pairing for match in found.sources[0].matches]
    first, last = pairing.round_outwards(0, TOKENS)
    blocks = token_row("sub-block")
    assert (first, pairing.granularity) == (0, SUB_BLOCK)
    assert blocks == [
        str(token // SUB_BLOCK) if token < last else "-" for token in range(len(blocks))
    ]
    [left] = unwritten_spans(ours, found, read_request(TOKENS))
    row = 2 * DIM  # bytes of two heads of one token
    page = int(token_row("decode page")[-1]) * DECODE_BLOCK * row
    [offset], [nbytes] = left.offsets.tolist(), left.nbytes.tolist()
    assert "-" in blocks[-DECODE_BLOCK:]
    assert (offset, nbytes) == (page, DECODE_BLOCK * row)


@pytest.mark.parametrize(("far", "near"), [("HND", "NHD"), ("HND", "HND"), ("NHD", "NHD")])
def test_copies_are_the_brackets_of_the_picture(far: str, near: str) -> None:
    rows = re.search(rf"^{far} to {near}\nprefill  (.*)\ndecode   (.*)$", PAGE, re.MULTILINE)
    assert rows is not None
    found, _ = plan(0, far, near)
    copies = build_copies(found.sources[0], read_request(SUB_BLOCK))
    for shown, addresses in zip(rows.groups(), (copies.remote, copies.local), strict=True):
        cells = shown.replace("[", "").replace("]", "").split()
        start = addresses.min() - cells.index("00") * DIM
        read = [
            " ".join(cells[at : at + size // DIM])
            for at, size in zip((addresses - start) // DIM, copies.nbytes.tolist(), strict=True)
        ]
        assert sorted(read) == sorted(re.findall(r"\[(.*?)\]", shown))


def fenced(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_prints_what_follows_it() -> None:
    run = subprocess.run(
        [sys.executable, "-c", fenced("python")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == fenced("text")


def test_the_last_row_has_the_sums() -> None:
    table = PAGE.split("| pairs of engines |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().replace(",", "") for cell in line.split("|")[2:-1]] for line in table]
    *parts, total = [[int(cell) if cell.isdigit() else 0 for cell in row] for row in rows]
    assert [sum(column) for column in zip(*parts, strict=True)] == total
