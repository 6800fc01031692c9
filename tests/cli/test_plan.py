"""``kvferry plan`` as a user runs it. The expected figures were computed by hand."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.cli import hybrid_configs as configs
from tests.cli.plan_command import LATENT, TINY, WINDOWS, Config, PlanCommand

ROOT = Path(__file__).parents[2]
HND = "layout=HND"
LLAMA: Config = json.loads((ROOT / "examples/configs/grouped.json").read_text())
"""The sizes of Llama 3 70B."""


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "tokens", "copies", "each"),
    [
        (TINY, "tp=1", "tp=1", 64, 4 * 4, 16 * 4 * 32),  # a copy per page and layer
        (TINY, "layout=BLHNC", "layout=BLHNC", 50, 4, 4 * 4 * 16 * 32),  # per block
        (TINY, HND, "layout=NHD,block_size=32", 64, 4 * 64 * 4, 32),  # orders cross
        (LATENT, "pp=3", "pp=2,block_size=32", 64, 4 * 4, 16 * 64),
        (WINDOWS, "tp=1", "tp=1", 64, 2 * 4 + 2 * 2, 16 * 4 * 32),  # windows: two pages
        (TINY, HND, "block_size=24", 1_000_000, 16_000_000, 32),
    ],
)
def test_count_and_size_of_copies(
    plan: PlanCommand, model: Config, prefill: str, decode: str, tokens: int, copies: int, each: int
) -> None:
    """Any others are compared with the copies themselves in ``test_plan_properties``."""
    total = plan.json(model, prefill, decode, f"--tokens={tokens}")["total"]
    sizes = {"smallest": each, "median": each, "largest": each}
    assert total == {"copies": copies, "bytes": copies * each} | sizes


# Who reads what.


def test_reads_between_different_parallel_sizes(plan: PlanCommand) -> None:
    found = plan.json(TINY, "tp=4", "tp=2,pp=2", "--tokens=16")
    pairs = {(read["decode"], read["prefill"]) for read in found["reads"]}
    assert pairs == {(0, 0), (0, 1), (1, 2), (1, 3), (2, 0), (2, 1), (3, 2), (3, 3)}
    assert found["reads"][-1]["fields"] == [
        {"shard": [3, 4], "keys": [f"layers.{n}.attn/{name}" for n in (2, 3) for name in "kv"]}
    ]
    assert [rank["readers"] for rank in found["prefill"]] == [2] * 4
    assert found["decode"][3]["coordinates"] == {"pp": 1, "tp": 1, "pcp": 0, "dcp": 0}


def test_unread_replicas_are_notified(plan: PlanCommand) -> None:
    found = plan.json(LATENT, "tp=4", "tp=2", "--tokens=16")
    assert [read["prefill"] for read in found["reads"]] == [0, 2]
    assert [rank["told_by"] for rank in found["prefill"]] == [None, 0, None, 1]
    assert [rank["tells"] for rank in found["decode"]] == [[1], [3]]


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "row"),
    [
        (LATENT, "tp=4", "tp=2", "1 each of 1, 3 nothing, and tells it so"),
        (
            *(TINY | {"num_hidden_layers": 6, "num_kv_shared_layers": 4}, "pp=2", "pp=3"),
            "1 (pp 1) 1 (pp 1) nothing, and tells it so 2 (pp 2) none nothing",
        ),
        (
            *(TINY, f"tp=2,{HND}", "pp=2,block_size=32"),
            "1 (pp 1) 0-1 layers 2-3, 2 heads from each 32,768 1 MiB 32 B",
        ),
        (TINY, "tp=2", "tp=2", "0-1 1 each of 0-1 layers 0-3, 2 heads 1,024"),
    ],
)
def test_alike_ranks_share_a_row_of_the_table(
    plan: PlanCommand, model: Config, prefill: str, decode: str, row: str
) -> None:
    assert row in plan.text(model, prefill, decode)


def test_rows_fit_a_terminal_and_are_whole_in_a_pipe(plan: PlanCommand) -> None:
    shown = ""
    for width in (80, 50, 0):
        ran = plan.between(configs.NEMOTRON_H, "tp=2", "tp=8", "--tokens=64", width=width)
        shown = ran.out
        words = " ".join(shown.split())
        # A row, or below 80 columns a line for each cell, whose words are not torn.
        assert ("decode rank from prefill what copies bytes" in words) == (width != 50)
        assert ("decode rank 0-7 from prefill 1 each of 0-1" in words) == (width == 50)
        assert "ssm" in words
        assert not width or max(map(len, shown.splitlines())) <= width
    row = next(line for line in shown.splitlines() if line.startswith("0-7 "))
    assert "24 of layers 0-50, conv/x, conv/B, conv/C, ssm; layers 7" in row


# Advice.


@pytest.mark.parametrize(
    ("prefill", "decode", "parts"),
    [
        (
            f"tp=8,{HND}",
            f"tp=8,{HND}",
            [
                "Small copies: 8 KiB. Below 16 KiB,",
                "a copy takes some 4 µs beside the time of its bytes: 164 ms for the 40,960 copies "
                "of a decode rank.",
                "Try layout=BLHNC on both: 4,096 copies of 640 KiB, 2.05 ms; 80 times fewer.",
                "vLLM on both: VLLM_KV_CACHE_LAYOUT=BLHNC",
            ],
        ),
        (
            *(f"tp=2,{HND}", f"tp=2,{HND}"),
            ["Many copies: 32 KiB. Between", "1,024 copies of 2.5 MiB, 2.05 ms; 80 times"],
        ),
        (f"tp=8,{HND}", f"tp=4,{HND}", ["Try layout=BHLNC on both: 4,096 copies"]),
    ],
)
def test_cost_of_many_copies_between_gpus(
    plan: PlanCommand, prefill: str, decode: str, parts: list[str]
) -> None:
    said = plan.text(LLAMA, prefill, decode, "--tokens=8192")
    assert [part for part in parts if part not in said] == []


@pytest.mark.parametrize(
    ("model", "settings", "tokens"),
    [
        (LLAMA, "tp=8,layout=BLHNC", 8192),  # 512 copies for a rank
        (LLAMA, f"tp=2,{HND}", 256),  # 1,280 copies for a rank
        (LLAMA, f"block_size=256,{HND}", 16384),  # of 1 MiB
        (TINY | {"head_dim": 256}, HND, 4096),
    ],
)
def test_few_or_large_copies_get_no_advice(
    plan: PlanCommand, model: Config, settings: str, tokens: int
) -> None:
    assert plan.json(model, settings, settings, f"--tokens={tokens}")["advice"] is None


def test_advice_on_layouts_of_other_memory_or_without_a_model(plan: PlanCommand) -> None:
    files = plan.layouts(LLAMA, f"tp=8,{HND}", f"tp=8,{HND}", "--tokens=512")
    for file in map(Path, files):
        file.write_text(file.read_text().replace('"kind":"cuda"', '"kind":"cpu"'))
    said = plan.text(None, *files, "--tokens=512")
    assert "Small copies: 8 KiB." in said
    assert "Nothing that was tried" in said
    assert "CUDA IPC" not in said


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "changes", "reason"),
    [
        (
            *(TINY, f"tp=2,{HND}", "block_size=32", 3),
            "Pages of 16 tokens (2 heads, HND) are read into pages of 32 tokens (4 heads, NHD): a ",
        ),
        (  # decode's first rank, which has no layer with a cache, says nothing of the others
            *(TINY | {"layer_types": ["mlp"] * 2 + ["attention"] * 2}, HND, "pp=2", 2),
            "Pages of 16 tokens (4 heads, HND) are read into pages of 16 tokens (4 heads, NHD): a ",
        ),
        (
            *(TINY, f"{HND},block_size=64,kernel_block=16", f"tp=4,{HND}", 0),
            "Pages of 64 tokens in blocks of 16 for the kernels (4 heads, HND) are read into "
            "pages of 16 tokens: a copy",
        ),
        (
            *(LATENT, "tp=2,dcp=2,block_size=32", "tp=4,dcp=4,interleave=8", 0),
            "of 32 tokens on 2 ranks by 1 are read into pages of 16 tokens on 4 ranks by 8: a copy",
        ),
    ],
)
def test_advice_says_why_and_predicts_the_resulting_plan(
    plan: PlanCommand, model: Config, prefill: str, decode: str, changes: int, reason: str
) -> None:
    now = plan.json(model, prefill, decode)
    assert any(reason in one for one in now["advice"]["reasons"])
    assert len(now["advice"]["changes"]) == changes
    for change in now["advice"]["changes"]:
        sides = _apply(prefill, change["prefill"]), _apply(decode, change["decode"])
        total = plan.json(model, *sides)["total"]
        assert total["copies"] == change["copies"] <= now["total"]["copies"] / 2
        assert total["median"] == change["median"] > now["total"]["median"]


def _apply(old: str, new: str) -> str:
    pairs = dict(pair.split("=") for pair in f"{old},{new}".strip(",").split(","))
    return ",".join(f"{key}={value}" for key, value in pairs.items())


# Files.


@pytest.mark.parametrize("model", [WINDOWS, configs.FALCON_H1], ids=["windows", "states"])
def test_written_layouts_give_the_same_plan(plan: PlanCommand, model: Config) -> None:
    sides = f"tp=2,{HND}", "pp=2,block_size=32"
    drawn = plan.json(model, *sides)
    again = plan.json(None, *plan.layouts(model, *sides))
    for name in ("reads", "prefill", "decode", "total"):
        assert again[name] == drawn[name]
    assert not again["advice"]["changes"]  # other settings are not tried without a model


def test_file_may_leave_out_coordinates(plan: PlanCommand) -> None:
    files = plan.layouts(TINY, "tp=2")
    for file in map(Path, files):
        file.write_text(json.dumps({"ranks": json.loads(file.read_text())["ranks"]}))
    found = plan.json(None, *files)
    assert [rank["coordinates"] for rank in found["prefill"] + found["decode"]] == [None] * 3


def test_engines_of_different_models_are_refused(plan: PlanCommand) -> None:
    prefill, _ = plan.layouts(TINY)
    kept = Path(prefill).rename(plan.folder / "kept.json")
    _, decode = plan.layouts(TINY | {"num_hidden_layers": 5})
    said = plan.refusal(None, str(kept), decode)
    assert said.startswith("kvferry: field 'layers.4.attn/k'")
    assert "local is decode, remote is prefill" in said


def test_too_small_cache_is_reported(plan: PlanCommand) -> None:
    files = plan.layouts(TINY, "tp=1", "tp=1", "--tokens=64")
    assert plan.json(None, *files, "--tokens=64")["total"]["copies"] == 4 * 4
    said = plan.refusal(None, *files, "--tokens=64", "--bandwidth=1GB/s", "--prompt=65")
    assert "page id there is 5; ids lie in 1 to 4 (local is" in said
    assert "the request has 65 tokens" in said


def test_readme_shows_the_printed_plan(plan: PlanCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, after = (ROOT / "README.md").read_text().split("```\n.venv/bin/kvferry plan ", 1)
    arguments, _, shown = after.split("\n```\n", 2)[0], *after.split("```\n", 3)[1:3]
    ran = plan.between(None, "", "", *shlex.split(arguments), width=100)
    printed = [line.rstrip() for line in ran.out.split("\n")]
    lines = [line for line in shown.removesuffix("```\n").splitlines() if line]
    assert [line for line in lines if line not in printed] == []
    assert len(lines) > 10


def test_picture_names_every_rank(plan: PlanCommand) -> None:
    pytest.importorskip("matplotlib")
    file = plan.folder / "plan.svg"
    plan.text(LATENT, "tp=4,pp=2", "tp=2", f"--svg={file}")
    texts = [element.text for element in ET.parse(file).iter() if element.tag.endswith("}text")]
    assert {f"prefill {n} (pp {n // 4}, tp {n % 4})" for n in range(8)} <= set(texts)
    assert {"decode 0 (tp 0)", "decode 1 (tp 1)"} <= set(texts)
    first = file.read_bytes()
    plan.text(LATENT, "tp=4,pp=2", "tp=2", f"--svg={file}")
    assert file.read_bytes() == first


@pytest.mark.parametrize("option", ["--svg", "--write-layouts"])
def test_file_that_cannot_be_written_is_reported(plan: PlanCommand, option: str) -> None:
    pytest.importorskip("matplotlib")
    (plan.folder / "taken").write_text("")
    taken = plan.folder / "taken" / "plan.svg"
    assert "cannot be written" in plan.refusal(TINY, "tp=1", "tp=1", f"{option}={taken}")
