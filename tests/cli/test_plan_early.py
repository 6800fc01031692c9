"""``kvferry plan --bandwidth``: what early tickets save. Expected figures were computed by hand."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.plan.early import Bandwidth, PrefillSpeed, early_case, parse_bandwidth
from kvferry.cli.plan.engines import PlanSettings, make_engine
from kvferry.cli.plan.estimate import estimate_reads
from kvferry.cli.plan.model import read_model
from tests.cli import hybrid_configs as configs
from tests.cli.plan_command import TINY, WINDOWS, Config, PlanCommand, write_config

ROOT = Path(__file__).parents[2]
TOKEN_BYTES = 4 * 4 * 32  # of ``TINY``


@pytest.mark.parametrize(
    ("model", "early", "late"),
    [
        (TINY, 4096 * TOKEN_BYTES, 0),
        # Two of four layers have a window of 20 tokens, 2 pages of 16.
        (WINDOWS, 4096 * TOKEN_BYTES // 2, 32 * TOKEN_BYTES // 2),
        (configs.QWEN3_NEXT, 8 * 544 * 12 * 2048, 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 2)),
    ],
)
def test_windows_and_states_are_moved_at_the_end(
    plan: PlanCommand, model: Config, early: int, late: int
) -> None:
    options = "--bandwidth=1MB/s", "--chunk=1024", "--prefill-rate=1024", "--hop=250"
    [case] = plan.json(model, "tp=1", "tp=1", *options)["early"]["cases"]
    assert (case["early_bytes"], case["late_bytes"]) == (early, late)
    assert case["prefill_seconds"] == 4
    assert case["move_seconds"] == pytest.approx((early + late) / 1e6)
    # The hop is part of the sequential time only.
    assert case["sequential_seconds"] == pytest.approx(4 + 0.25 + case["move_seconds"])
    assert case["saved"] == pytest.approx(1 - case["early_seconds"] / case["sequential_seconds"])


@given(
    prompt=st.integers(1, 3000),
    chunk=st.integers(1, 3000),
    prefill_rate=st.floats(1, 1e6),
    megabytes=st.floats(0.01, 1e4),
    windows=st.booleans(),
)
def test_times_are_those_of_chunks_moved_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory,
    prompt: int,
    chunk: int,
    prefill_rate: float,
    megabytes: float,
    windows: bool,
) -> None:
    folder = tmp_path_factory.mktemp("model")
    model = read_model(Path(write_config(folder, WINDOWS if windows else TINY)))
    engine = make_engine(model, PlanSettings(), prompt)
    bandwidth = parse_bandwidth(f"{megabytes:.6f}MB/s")
    prefill = PrefillSpeed(chunk=chunk, prefill_rate=prefill_rate, hop_seconds=0)
    case = early_case(prefill, bandwidth, estimate_reads(engine, engine, prompt))
    rate = bandwidth.bytes_per_second
    moved = 0.0
    for start in range(0, prompt, chunk):
        stop = min(start + chunk, prompt)
        nbytes = case["early_bytes"] * (stop - start) / prompt
        moved = max(moved, stop / prefill_rate) + nbytes / rate
    assert case["early_seconds"] == pytest.approx(moved + case["late_bytes"] / rate)
    assert case["early_seconds"] <= case["sequential_seconds"] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25Gbit", 25e9 / 8),
        ("25 Gbit/s", 25e9 / 8),
        ("800kbps", 1e5),
        ("1.5GiB/s", 1.5 * (1 << 30)),
        ("0.4Tbit", 5e10),
    ],
)
def test_units_of_a_bandwidth(text: str, rate: float) -> None:
    assert parse_bandwidth(text) == Bandwidth(text=text, bytes_per_second=rate)


def test_invalid_options_are_refused(plan: PlanCommand) -> None:
    for option, said in {
        **dict.fromkeys(
            [f"--bandwidth={text}" for text in ("25", "25Gb", "1e9B/s", "0Gbit", "9000TB/s")],
            "is no rate from 1B/s to 1000TB/s: write a number with a unit, bits as in 25Gbit",
        ),
        "--prompt=4096": "--prompt 4096 is a prompt for --bandwidth: add --bandwidth",
    }.items():
        assert said in plan.refusal(TINY, "tp=1", "tp=1", option)


def test_table_as_text(plan: PlanCommand) -> None:
    options = "--bandwidth=1MB/s", "--chunk=1024", "--prefill-rate=1024", "--hop=20"
    assert (
        "if prefill computes 1,024 tokens/s in chunks of 1,024 tokens, and decode starts to read "
        "20 ms after prefill's end: bandwidth prompt chunks prefill moving sequential early saved "
        "1MB/s 4,096 4 4 s 2.1 s 6.12 s 4.52 s 26%"
    ) in plan.text(TINY, "tp=1", "tp=1", *options)
    assert "moving at end sequential" in plan.text(WINDOWS, "tp=1", "tp=1", *options)


def test_documented_table_is_what_the_command_prints(
    plan: PlanCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "early-tickets.md").read_text()
    command = page.split("```\nkvferry plan ", 1)[1].split("\n```", 1)[0].replace("\\\n", " ")
    rows = [
        " ".join(cell.strip() for cell in line.strip("|").split("|"))
        for line in page.splitlines()
        if line.startswith("|") and "Gbit |" in line
    ]
    ran = plan.between(None, "", "", *shlex.split(command))
    assert [row for row in rows if row not in ran.words] == []
    assert len(rows) == 9
