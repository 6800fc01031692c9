"""``kvferry plan`` as a user runs it. The expected figures were computed by hand."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.cli.plan_command import LATENT, TINY, WINDOWS, make_plan, run_kvferry, write_config

Capture = pytest.CaptureFixture[str]

COPY_SIZES = [
    # model, prefill, decode, tokens: copies, bytes of each
    pytest.param(TINY, "tp=1", "tp=1", 64, 4 * 4, 16 * 4 * 32, id="one copy per page and layer"),
    pytest.param(TINY, "tp=1", "tp=1", 50, 4 * 4, 16 * 4 * 32, id="partial last page"),
    pytest.param(TINY, "tp=2", "tp=1", 64, 4 * 64 * 2, 2 * 32, id="two heads of a token"),
    pytest.param(
        TINY, "tp=2,layout=HND", "tp=1,layout=HND", 64, 4 * 4 * 2, 2 * 16 * 32, id="HND: of a page"
    ),
    pytest.param(
        TINY, "layout=HND", "layout=NHD,block_size=32", 64, 4 * 64 * 4, 32, id="orders cross"
    ),
    pytest.param(
        TINY, "layout=BLHNC", "layout=BLHNC", 64, 4, 4 * 4 * 16 * 32, id="one copy per block"
    ),
    pytest.param(
        TINY, "layout=BHLNC,tp=2", "layout=BHLNC", 64, 4 * 2, 4 * 2 * 16 * 32, id="heads of a block"
    ),
    pytest.param(
        TINY, "layout=LHBNC", "layout=LHBNC", 64, 4 * 4 * 4, 16 * 32, id="heads outside blocks"
    ),
    pytest.param(
        TINY,
        "layout=HND,block_size=32,kernel_block=16",
        "layout=HND,block_size=32",
        64,
        4 * 4 * 4,
        16 * 32,
        id="kernels cut pages",
    ),
    pytest.param(LATENT, "tp=1", "tp=1,block_size=32", 64, 4 * 4, 16 * 64, id="latents"),
    pytest.param(WINDOWS, "tp=1", "tp=1", 64, 2 * 4 + 2 * 2, 16 * 4 * 32, id="windows: two pages"),
    pytest.param(TINY, "pp=3", "pp=2", 64, 4 * 4, 16 * 4 * 32, id="pipelines"),
]


@pytest.mark.parametrize(("model", "prefill", "decode", "tokens", "copies", "each"), COPY_SIZES)
def test_count_and_size_of_copies(
    tmp_path: Path,
    capsys: Capture,
    model: dict[str, Any],
    prefill: str,
    decode: str,
    tokens: int,
    copies: int,
    each: int,
) -> None:
    total = make_plan(
        capsys, [write_config(tmp_path, model)], prefill, decode, f"--tokens={tokens}"
    )
    sizes = {"smallest": each, "median": each, "largest": each}
    assert total["total"] == {"copies": copies, "bytes": copies * each} | sizes


def test_indivisible_page_sizes_give_two_copy_sizes(tmp_path: Path, capsys: Capture) -> None:
    sides = "layout=HND", "layout=HND,block_size=24"
    total = make_plan(capsys, [write_config(tmp_path, TINY)], *sides, "--tokens=96")["total"]
    # Pages of 16 and of 24 tokens cut 48 tokens into runs of 16, 8, 8 and 16, per layer and head.
    sizes = {"smallest": 8 * 32, "median": 8 * 32, "largest": 16 * 32}
    assert total == {"copies": 4 * 4 * 8, "bytes": 96 * 4 * 4 * 32} | sizes


def test_all_copies_of_a_long_request_are_counted(tmp_path: Path, capsys: Capture) -> None:
    model = [write_config(tmp_path, TINY)]
    sides = "layout=HND", "layout=NHD,block_size=24"
    total = make_plan(capsys, model, *sides, "--tokens=1000000")["total"]
    assert (total["copies"], total["bytes"]) == (16_000_000, 16_000_000 * 32)


def test_reads_between_different_parallel_sizes(tmp_path: Path, capsys: Capture) -> None:
    found = make_plan(capsys, [write_config(tmp_path, TINY)], "tp=4", "tp=2,pp=2", "--tokens=16")
    pairs = {(read["decode"], read["prefill"]) for read in found["reads"]}
    assert pairs == {(0, 0), (0, 1), (1, 2), (1, 3), (2, 0), (2, 1), (3, 2), (3, 3)}
    last = found["reads"][-1]
    assert last["fields"] == [
        {"shard": [3, 4], "keys": [f"layers.{n}.attn/{name}" for n in (2, 3) for name in "kv"]}
    ]
    assert [rank["readers"] for rank in found["prefill"]] == [2] * 4
    assert found["decode"][3]["coordinates"] == {"pp": 1, "tp": 1, "pcp": 0, "dcp": 0}


def test_unread_replicas_are_notified(tmp_path: Path, capsys: Capture) -> None:
    found = make_plan(capsys, [write_config(tmp_path, LATENT)], "tp=4", "tp=2", "--tokens=16")
    assert [read["prefill"] for read in found["reads"]] == [0, 2]
    assert [rank["told_by"] for rank in found["prefill"]] == [None, 0, None, 1]
    assert [rank["tells"] for rank in found["decode"]] == [[1], [3]]
    ran = run_kvferry(
        capsys, "plan", write_config(tmp_path, LATENT), "--prefill", "tp=4", "--decode", "tp=2"
    )
    assert "none; 0 tells it so" in ran.words


def test_ranks_without_cache_take_part(tmp_path: Path, capsys: Capture) -> None:
    model = write_config(tmp_path, TINY | {"num_hidden_layers": 6, "num_kv_shared_layers": 4})
    found = make_plan(capsys, [model], "tp=1,pp=2", "tp=1,pp=3")
    assert [(read["decode"], read["prefill"]) for read in found["reads"]] == [(0, 0)]
    assert [rank["told_by"] for rank in found["prefill"]] == [None, 1]
    ran = run_kvferry(capsys, "plan", model, "--prefill", "tp=1,pp=2", "--decode", "tp=1,pp=3")
    assert "1 (pp 1) 1 nothing, and tells it so 2 (pp 2) none nothing" in ran.words


def test_tokens_interleaved_over_ranks(tmp_path: Path, capsys: Capture) -> None:
    sides = "tp=2,dcp=2,interleave=4", "tp=4,dcp=4,interleave=8"
    found = make_plan(capsys, [write_config(tmp_path, LATENT)], *sides, "--tokens=64")
    # Each decode rank has 16 tokens in runs of 8, which lie in runs of 4 on two ranks.
    assert {(read["bytes"], read["median"]) for read in found["reads"]} == {(4 * 8 * 64, 4 * 64)}
    assert len(found["reads"]) == 8


def test_table_and_advice_as_text(tmp_path: Path, capsys: Capture) -> None:
    model = write_config(tmp_path, TINY)
    sides = "--prefill", "tp=2,layout=HND", "--decode", "pp=2,block_size=32"
    ran = run_kvferry(capsys, "plan", model, *sides, "--tokens=64")
    for part in (
        "4 layers, 4 KV heads (k 8 + v 8, bfloat16): 512 B per token",
        "prefill 2 ranks tp=2,pp=1,block_size=16,layout=LBHNC",
        "A request of 64 tokens takes 32 KiB in 1,024 copies of 32 B",
        "0 (pp 0) 0 (tp 0) layers 0-1, heads 0-1 256 8 KiB 32 B",
        "1 (pp 1) 0 (tp 0) layers 2-3, heads 0-1 256 8 KiB 32 B",
        "1 (tp 1) layers 0-3, heads 2-3 0-1 512 16 KiB",
        "Small copies: 32 B.",
        "Decode keeps the heads of a token together (NHD), prefill the tokens of a head (HND)",
        "Try layout=LBHNC on decode: 64 copies of 512 B; 16 times fewer.",
        "VLLM_KV_CACHE_LAYOUT=LBHNC",
    ):
        assert part in ran.words


LLAMA = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 8192,
    "dtype": "bfloat16",
}
"""The sizes of Llama 3 70B."""


@pytest.mark.parametrize(
    ("sides", "parts"),
    [
        (
            ["tp=8,layout=HND", "tp=8,layout=HND"],
            [
                "Small copies: 8 KiB.",
                "a copy takes some 4 µs beside the time of its bytes: 164 ms for the 40,960 copies "
                "of a decode rank.",
                "Try layout=BLHNC on both: 4,096 copies of 640 KiB; 80 times fewer.",
                "Between GPUs of one host (CUDA IPC): 2.0 ms.",
                "vLLM: VLLM_KV_CACHE_LAYOUT=BLHNC",
                "FLASH_ATTN, FLASHINFER and TRITON_ATTN can; CPU_ATTN, FLEX_ATTENTION",
                "Without the variable, kvferry asks for LBHNC (not with MLA).",
            ],
        ),
        (
            ["tp=2,layout=HND", "tp=2,layout=HND"],
            [
                "Many copies of 32 KiB.",
                "164 ms for the 40,960 copies of a decode rank.",
                "Try layout=BLHNC on both: 1,024 copies of 2.5 MiB; 80 times fewer.",
            ],
        ),
        (
            ["tp=8,layout=HND", "tp=4,layout=HND"],
            [
                "328 ms for the 81,920 copies of a decode rank.",
                "Try layout=BHLNC on both: 4,096 copies of 640 KiB; 80 times fewer.",
                "Between GPUs of one host (CUDA IPC): 4.1 ms.",
                "FLASHINFER too but on compute capability 10",
            ],
        ),
    ],
)
def test_cost_of_many_copies_between_gpus(
    tmp_path: Path, capsys: Capture, sides: list[str], parts: list[str]
) -> None:
    model = write_config(tmp_path, LLAMA)
    prefill, decode = sides
    ran = run_kvferry(
        capsys, "plan", model, "--prefill", prefill, "--decode", decode, "--tokens=8192"
    )
    for part in parts:
        assert part in ran.words


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ("tp=8,layout=BLHNC", 8192),  # 512 copies for a rank
        ("tp=2,layout=HND", 256),  # 1,280 copies for a rank
        ("tp=1,block_size=256,layout=HND", 16384),  # of 1 MiB
    ],
)
def test_few_or_long_copies_between_gpus_get_no_advice(
    tmp_path: Path, capsys: Capture, settings: str, tokens: int
) -> None:
    model = [write_config(tmp_path, LLAMA)]
    assert make_plan(capsys, model, settings, settings, f"--tokens={tokens}")["advice"] is None


def test_copies_in_cpu_memory_have_no_cost_between_gpus(tmp_path: Path, capsys: Capture) -> None:
    model = [write_config(tmp_path, LLAMA)]
    sides = "tp=8,layout=HND", "tp=8,layout=HND"
    make_plan(capsys, model, *sides, "--tokens=8192", f"--write-layouts={tmp_path}")
    files = [tmp_path / f"{name}.json" for name in ("prefill", "decode")]
    for file in files:
        file.write_text(file.read_text().replace('"kind":"cuda"', '"kind":"cpu"'))
    ran = run_kvferry(
        capsys, "plan", f"--prefill={files[0]}", f"--decode={files[1]}", "--tokens=8192"
    )
    assert "Small copies: 8 KiB." in ran.words
    assert "CUDA IPC" not in ran.words


def test_many_copies_that_nothing_would_reduce_get_no_advice(
    tmp_path: Path, capsys: Capture
) -> None:
    model = [write_config(tmp_path, LLAMA)]
    sides = "tp=2,layout=HND", "tp=2,layout=HND"
    make_plan(capsys, model, *sides, "--tokens=8192", f"--write-layouts={tmp_path}")
    files = [str(tmp_path / f"{name}.json") for name in ("prefill", "decode")]
    # Without a model, only equal layouts are tried, and these layouts are equal.
    assert make_plan(capsys, [], *files, "--tokens=8192")["advice"] is None


def test_large_copies_get_no_advice(tmp_path: Path, capsys: Capture) -> None:
    model = write_config(tmp_path, TINY | {"head_dim": 256})
    sides = "--prefill", "layout=HND", "--decode", "layout=HND"
    assert make_plan(capsys, [model], *(sides[1], sides[3]))["advice"] is None
    assert "Small" not in run_kvferry(capsys, "plan", model, *sides).out


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("tp=2,layout=HND", "tp=1,block_size=32"),
        ("tp=2", "tp=4"),
        ("tp=2,layout=HND", "tp=2,layout=HND"),
        ("layout=HND,block_size=64,kernel_block=16", "layout=HND,block_size=64"),
    ],
)
def test_advice_predicts_the_resulting_plan(
    tmp_path: Path, capsys: Capture, prefill: str, decode: str
) -> None:
    model = [write_config(tmp_path, TINY)]
    now = make_plan(capsys, model, prefill, decode)
    assert now["advice"]["changes"]
    for change in now["advice"]["changes"]:
        other = make_plan(
            capsys,
            model,
            _apply(prefill, change["prefill"]),
            _apply(decode, change["decode"]),
        )
        assert other["total"]["copies"] == change["copies"] <= now["total"]["copies"] / 2
        assert other["total"]["median"] == change["median"] > now["total"]["median"]


def _apply(old: str, new: str) -> str:
    pairs = dict(pair.split("=") for pair in f"{old},{new}".strip(",").split(","))
    return ",".join(f"{key}={value}" for key, value in pairs.items())


def test_different_interleaves_are_advised_against(tmp_path: Path, capsys: Capture) -> None:
    sides = "tp=2,dcp=2", "tp=4,dcp=4,interleave=8"
    advice = make_plan(capsys, [write_config(tmp_path, LATENT)], *sides)["advice"]
    assert "spread over 2 ranks by 1 on prefill and 4 ranks by 8 on decode" in advice["reasons"][0]
    assert advice["changes"][0]["prefill"] == "interleave=8"


def test_absence_of_better_settings_is_reported(tmp_path: Path, capsys: Capture) -> None:
    model = write_config(tmp_path, TINY | {"num_hidden_layers": 1})
    sides = "--prefill", "layout=HND", "--decode", "layout=HND"
    ran = run_kvferry(capsys, "plan", model, *sides, "--tokens=16")
    assert "Each copy is already all that lies in one piece" in ran.words
    assert "Nothing that was tried" in ran.words


def test_written_layouts_give_the_same_plan(tmp_path: Path, capsys: Capture) -> None:
    sides = "tp=2,layout=HND", "pp=2,block_size=32"
    folder = tmp_path / "layouts"
    model = [write_config(tmp_path, WINDOWS)]
    drawn = make_plan(capsys, model, *sides, "--write-layouts", str(folder))
    again = make_plan(capsys, [], str(folder / "prefill.json"), str(folder / "decode.json"))
    advice = again.pop("advice")
    assert again == {name: value for name, value in drawn.items() if name != "advice"}
    # Without a model, the advice cannot try other settings, only equal layouts.
    assert advice["changes"][0]["prefill"] == "the ranks, order and pages of decode"


def test_single_layout_is_an_engine_of_one_rank(tmp_path: Path, capsys: Capture) -> None:
    make_plan(
        capsys, [write_config(tmp_path, TINY)], "tp=1", "tp=1", "--write-layouts", str(tmp_path)
    )
    whole = (tmp_path / "prefill.json").read_text()
    alone = whole[whole.index("[") + 1 : whole.index('],"coordinates"')]
    (tmp_path / "alone.json").write_text(alone)
    both = make_plan(capsys, [], str(tmp_path / "alone.json"), str(tmp_path / "decode.json"))
    assert both["prefill"] == [both["prefill"][0] | {"rank": 0, "coordinates": None}]


def test_states_are_planned_from_layouts(tmp_path: Path, capsys: Capture) -> None:
    for name, halves in (("prefill", 2), ("decode", 1)):
        (tmp_path / f"{name}.json").write_text(_state_engine(halves))
    sides = (str(tmp_path / f"{name}.json") for name in ("prefill", "decode"))
    found = make_plan(capsys, [], *sides)
    # A state is one page for any number of tokens: 8 channels of 4 bytes, half on each rank.
    assert [(read["copies"], read["bytes"]) for read in found["reads"]] == [(1, 16), (1, 16)]
    table = run_kvferry(
        capsys,
        "plan",
        *(f"--{name}={tmp_path / name}.json" for name in ("prefill", "decode")),
    )
    assert "layer 3, ssm 0-3" in table.words


def _state_engine(ranks: int) -> str:
    held = 8 // ranks
    field = {
        "key": "model.layers.3.mixer/ssm",
        "group": 0,
        "region": 0,
        "offset": 0,
        "page_stride": held * 4,
        "pages": 5,
        "dtype": "float32",
        "unit": 4,
        "shard": [{"count": held, "stride": 4}],
    }
    layouts = [
        {
            "regions": [{"address": 4096, "nbytes": 320}],
            "groups": [{"kind": "state", "block_tokens": 0}],
            "fields": [field | {"shard_range": [rank * held, rank * held + held]}],
        }
        for rank in range(ranks)
    ]
    return json.dumps({"ranks": layouts})


def test_engines_of_different_models_are_refused(tmp_path: Path, capsys: Capture) -> None:
    for name, layers in (("prefill", 4), ("decode", 5)):
        model = write_config(tmp_path, TINY | {"num_hidden_layers": layers})
        make_plan(capsys, [model], "tp=1", "tp=1", "--write-layouts", str(tmp_path / name))
    ran = run_kvferry(
        capsys,
        "plan",
        f"--prefill={tmp_path}/prefill/prefill.json",
        f"--decode={tmp_path}/decode/decode.json",
    )
    assert ran.status == 1
    assert ran.err.startswith("kvferry: field 'layers.4.attn/k'")
    assert "local is decode, remote is prefill" in ran.err
    assert "Traceback" not in ran.err


def test_too_small_cache_is_reported_with_largest_request(tmp_path: Path, capsys: Capture) -> None:
    make_plan(
        capsys,
        [write_config(tmp_path, TINY)],
        "tp=1",
        "tp=1",
        f"--write-layouts={tmp_path}",
        "--tokens=64",
    )
    sides = [f"--{name}={tmp_path / name}.json" for name in ("prefill", "decode")]
    ran = run_kvferry(capsys, "plan", *sides, "--tokens=65")
    assert (ran.status, "choose at most 64 tokens" in ran.err) == (1, True)


def test_readme_shows_the_printed_plan(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    _, after = (root / "README.md").read_text().split("```\n.venv/bin/kvferry plan ", 1)
    arguments, _, shown = after.split("\n```\n", 2)[0], *after.split("```\n", 3)[1:3]
    ran = run_kvferry(capsys, "plan", *shlex.split(arguments), width=100)
    printed = [line.rstrip() for line in ran.out.splitlines()]
    lines = [line for line in shown.removesuffix("```\n").splitlines() if line]
    assert [line for line in lines if line not in printed] == []
    assert len(lines) > 10


def test_help_and_plan_load_no_needless_modules(tmp_path: Path) -> None:
    code = """
import sys
from kvferry.cli import main
sys.argv = ["kvferry", "plan", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
print(*(name for name in ("numpy", "rich.table", "matplotlib", "zmq") if name in sys.modules))
"""

    def loaded(*arguments: str) -> list[str]:
        command = [sys.executable, "-c", code, *arguments]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return run.stdout.splitlines()[-1].split()

    assert loaded("--help") == []
    model = write_config(tmp_path, TINY)
    assert "matplotlib" not in loaded(model, "--prefill", "tp=1", "--decode", "tp=1")


def test_picture_names_every_rank(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    model, file = write_config(tmp_path, LATENT), tmp_path / "plan.svg"
    sides = "--prefill", "tp=4,pp=2", "--decode", "tp=2"
    ran = run_kvferry(capsys, "plan", model, *sides, f"--svg={file}")
    assert ran.status == 0, ran.err
    texts = [element.text for element in ET.parse(file).iter() if element.tag.endswith("}text")]
    assert {f"prefill {n} (pp {n // 4}, tp {n % 4})" for n in range(8)} <= set(texts)
    assert {"decode 0 (tp 0)", "decode 1 (tp 1)"} <= set(texts)
    assert "dashed: only told that nobody reads it" in texts
    first = file.read_bytes()
    run_kvferry(capsys, "plan", model, *sides, f"--svg={file}")
    assert file.read_bytes() == first


def test_picture_without_matplotlib_names_the_extra(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "kvferry.cli.plan.picture", raising=False)
    model = write_config(tmp_path, TINY)
    ran = run_kvferry(
        capsys, "plan", model, "--prefill=tp=1", "--decode=tp=1", f"--svg={tmp_path / 'plan.svg'}"
    )
    assert ran.status == 1
    assert "pip install 'kvferry[plot]'" in ran.err


def test_unwritable_picture_is_reported(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    ran = run_kvferry(
        capsys,
        "plan",
        write_config(tmp_path, TINY),
        "--prefill=tp=1",
        "--decode=tp=1",
        f"--svg={tmp_path / 'none' / 'plan.svg'}",
    )
    assert (ran.status, "cannot be written: No such file" in ran.err) == (1, True)
