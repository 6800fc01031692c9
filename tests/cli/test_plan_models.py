"""``kvferry plan`` reads the configs of hybrids with states and of multimodal models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli import hybrid_configs as configs
from tests.cli.plan_command import make_plan, run_kvferry, write_config

Capture = pytest.CaptureFixture[str]
Config = dict[str, Any]

EQUAL_ENGINES = "--prefill=tp=1", "--decode=tp=1"

HYBRIDS = [
    # config, layers with attention, their bytes per token; layers with a state, its bytes
    pytest.param(
        configs.QWEN3_NEXT, 12, 2048, 36, 8192 * 3 * 2 + 32 * 128 * 128 * 2, id="gated delta net"
    ),
    pytest.param(
        configs.QWEN3_5, 8, 4096, 24, 8192 * 3 * 2 + 32 * 128 * 128 * 4, id="nested, in float32"
    ),
    pytest.param(
        configs.NEMOTRON_H, 4, 4096, 24, 10240 * 3 * 2 + 128 * 64 * 128 * 4, id="pattern of layers"
    ),
    pytest.param(
        configs.NEMOTRON_H_BY_TYPES,
        4,
        4096,
        24,
        10240 * 3 * 2 + 128 * 64 * 128 * 4,
        id="types of layers",
    ),
    pytest.param(configs.GRANITE, 4, 2048, 36, 4352 * 3 * 2 + 64 * 64 * 128 * 2, id="one group"),
    pytest.param(
        configs.FALCON_H1, 36, 512, 36, 1792 * 3 * 2 + 24 * 64 * 128 * 2, id="both in each layer"
    ),
    pytest.param(
        configs.ZAMBA2, 6, 16384, 38, 4352 * 3 * 2 + 64 * 64 * 128 * 2, id="both in some layers"
    ),
    pytest.param(configs.JAMBA, 4, 4096, 28, 8192 * 3 * 2 + 8192 * 16 * 2, id="Mamba 1"),
    pytest.param(configs.LFM2, 6, 2048, 10, 2048 * 2 * 2, id="short convolution"),
    pytest.param(
        configs.KIMI_LINEAR, 7, 1152, 20, 12288 * 3 * 2 + 32 * 128 * 128 * 4, id="KDA and MLA"
    ),
]


@pytest.mark.parametrize(("config", "attending", "token", "stateful", "state"), HYBRIDS)
@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_bytes_of_hybrids(
    tmp_path: Path,
    capsys: Capture,
    config: Config,
    attending: int,
    token: int,
    stateful: int,
    state: int,
    layout: str,
) -> None:
    model = [write_config(tmp_path, config)]
    # A page of the block size that vLLM chooses has room for a state.
    step = 128 if config is configs.KIMI_LINEAR else 16
    block = step * -(-state // (step * token))
    sides = f"layout={layout}", f"layout={layout}"
    found = make_plan(capsys, model, *sides, f"--tokens={block}")
    assert found["total"]["bytes"] == attending * block * token + stateful * state
    assert [f"have {block:,} tokens instead of 16" in note for note in found["notes"]] == [
        True,
        True,
    ] * (block > 16)


def test_table_names_the_states(tmp_path: Path, capsys: Capture) -> None:
    model = write_config(tmp_path, configs.QWEN3_NEXT)
    ran = run_kvferry(capsys, "plan", model, "--prefill=tp=2", "--decode=tp=1")
    for part in (
        "12 layers, 2 KV heads (k 256 + v 256, bfloat16): 24 KiB per token",
        "layers 0-2, 4-6, 8-10,",
        "have a state: 1.05 MiB each (8,192 channels of 3 tokens in bfloat16, "
        "32 x 16,384 elements in bfloat16)",
        "prefill 2 ranks tp=2,pp=1,block_size=544,layout=LBNHC",
        "Pages of decode have 544 tokens instead of 16: vLLM enlarges them until a page of "
        "attention has room for a state.",
        "conv/q and conv/k 0-1023",
        "conv/v 0-2047",
        "ssm 0-15",
    ):
        assert part in ran.words


def test_ranks_split_states_by_heads_and_copy_a_single_group(
    tmp_path: Path, capsys: Capture
) -> None:
    model = [write_config(tmp_path, configs.GRANITE)]
    found = make_plan(capsys, model, "tp=2", "tp=4", "--tokens=16")
    shards = {
        key.partition("/")[2]: tuple(fields["shard"])
        for read in found["reads"]
        if read["decode"] == 3
        for fields in read["fields"]
        for key in fields["keys"]
        if ".0." in key
    }
    assert shards == {
        "conv/x": (3072, 4096),
        "conv/B": (0, 128),
        "conv/C": (0, 128),
        "ssm": (48, 64),
    }


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (configs.NEMOTRON_H, "tp=16", "tp=16 does not divide the 8 units of a state's B channels"),
        (
            configs.QWEN3_NEXT | {"linear_num_value_heads": 1},
            "tp=2",
            "tp=2 does not divide the 1 heads of a state",
        ),
        (configs.GRANITE, "layout=LHBNC", "use one of LBHNC, LBNHC, BLHNC, BLNHC, BHLNC"),
    ],
)
def test_settings_that_no_hybrid_can_have_are_refused(
    tmp_path: Path, capsys: Capture, config: Config, settings: str, said: str
) -> None:
    ran = run_kvferry(
        capsys, "plan", write_config(tmp_path, config), f"--prefill={settings}", "--decode=tp=1"
    )
    assert (ran.status, said in ran.err) == (1, True), ran.err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            configs.NEMOTRON_H | {"hybrid_override_pattern": "MX" * 26},
            "'hybrid_override_pattern' has the letter 'X'; known are M, *, -, E",
        ),
        (
            configs.NEMOTRON_H | {"hybrid_override_pattern": "M*"},
            "'hybrid_override_pattern' has 2 entries for 52 layers",
        ),
        (
            configs.NEMOTRON_H_BY_TYPES | {"layers_block_type": ["mamba", "attention"]},
            "'layers_block_type' has 2 entries for 52 layers",
        ),
        (
            configs.JAMBA | {"hidden_size": 4, "num_attention_heads": 8},
            "hidden_size=4 is less than num_attention_heads=8",
        ),
        (
            configs.JAMBA | {"mamba_expand": 0.0001},
            "mamba_expand=0.0001 and hidden_size=4096 give 0 channels",
        ),
        (
            configs.GRANITE | {"mamba_expand": 0.0001},
            "mamba_expand=0.0001 and hidden_size=2048 give 0 channels",
        ),
        (
            configs.GRANITE | {"mamba_expand": 0.01},
            "mamba_n_heads=64 is more than the 20 channels of mamba_expand=0.01 and "
            "hidden_size=2048",
        ),
        (
            configs.FALCON_H1 | {"mamba_d_head": "auto", "mamba_d_ssm": 8},
            "mamba_n_heads=24 is more than the 8 channels of mamba_d_ssm=8",
        ),
        (configs.QWEN3_NEXT | {"linear_key_head_dim": None}, "`linear_key_head_dim`"),
        (configs.QWEN3_NEXT | {"full_attention_interval": 0}, "`$.full_attention_interval`"),
        (configs.GRANITE | {"mamba_d_head": "any"}, "`$.mamba_d_head`"),
        (configs.QWEN3_5 | {"text_config": {"mamba_ssm_dtype": "int4"}}, "num_hidden_layers"),
        (configs.QWEN3_NEXT | {"mamba_ssm_dtype": "int4"}, "unknown element type 'int4'"),
        (configs.KIMI_LINEAR | {"linear_attn_config": {"num_heads": 2}}, "linear_attn_config"),
    ],
)
def test_incomplete_hybrids_are_refused(
    tmp_path: Path, capsys: Capture, config: Config, said: str
) -> None:
    ran = run_kvferry(capsys, "plan", write_config(tmp_path, config), *EQUAL_ENGINES)
    assert (ran.status, said in ran.err) == (1, True), ran.err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("kernel_block=12,block_size=24", "kernel_block=12 does not divide block_size=32"),
        ("interleave=24,block_size=24", "interleave=24 does not divide block_size=32"),
    ],
)
def test_settings_that_do_not_fit_enlarged_pages_are_refused_with_both_sizes(
    tmp_path: Path, capsys: Capture, settings: str, said: str
) -> None:
    # A state fits into 16 tokens, and vLLM rounds 24 up to a multiple of 16.
    model = write_config(tmp_path, configs.LFM2 | {"num_key_value_heads": 1, "conv_dim": 1024})
    ran = run_kvferry(capsys, "plan", model, f"--prefill={settings}", "--decode=tp=1")
    assert ran.status == 1
    assert f"--prefill: {said} (vLLM enlarges block_size=24 to 32" in ran.err


def test_advice_for_hybrids_predicts_the_resulting_plan(tmp_path: Path, capsys: Capture) -> None:
    model = [write_config(tmp_path, configs.QWEN3_NEXT)]
    now = make_plan(capsys, model, "layout=HND,tp=2", "layout=NHD,tp=1")
    change = now["advice"]["changes"][0]
    assert change["decode"] == "layout=LBHNC"
    after = make_plan(capsys, model, "layout=HND,tp=2", "layout=LBHNC,tp=1")
    assert after["total"]["copies"] == change["copies"]


PER_TOKEN = 34 * 4 * 512 * 2
MULTIMODAL = [
    pytest.param({"text_config": configs.TEXT, "dtype": "bfloat16"}, id="text_config"),
    pytest.param({"llm_config": configs.TEXT | {"torch_dtype": "bfloat16"}}, id="llm_config"),
    pytest.param(
        {"language_config": configs.TEXT | {"torch_dtype": "bfloat16"}}, id="language_config"
    ),
    pytest.param(
        {
            "thinker_config": {"text_config": configs.TEXT, "audio_config": configs.VISION},
            "talker_config": {"text_config": configs.VISION},
        },
        id="thinker_config",
    ),
    pytest.param(configs.TEXT | {"torch_dtype": "bfloat16"}, id="flat, with a vision part"),
    pytest.param(
        {"text_config": configs.TEXT | {"dtype": "float32"}, "torch_dtype": "bfloat16"},
        id="element type of the top level",
    ),
    pytest.param(
        {"text_config": configs.TEXT | {"head_dim": 0, "hidden_size": 8 * 256}},
        id="head size 0",
    ),
]


@pytest.mark.parametrize("config", MULTIMODAL)
def test_text_part_of_multimodal_models(tmp_path: Path, capsys: Capture, config: Config) -> None:
    model = [write_config(tmp_path, config | {"vision_config": configs.VISION})]
    found = make_plan(capsys, model, "tp=1", "tp=1", "--tokens=16")
    assert found["total"]["bytes"] == 16 * PER_TOKEN


def test_keys_left_to_defaults_are_reported_with_remedy(tmp_path: Path, capsys: Capture) -> None:
    config = {"text_config": {"model_type": "llama", "vocab_size": 32064}}
    ran = run_kvferry(capsys, "plan", write_config(tmp_path, config), *EQUAL_ENGINES)
    assert ran.status == 1
    assert "missing required field `num_hidden_layers`" in ran.err
    assert "to_json_file(FILE, use_diff=False)" in ran.err


def test_assumed_heads_are_reported(tmp_path: Path, capsys: Capture) -> None:
    config = {"text_config": configs.TEXT | {"num_key_value_heads": None}}
    ran = run_kvferry(capsys, "plan", write_config(tmp_path, config), *EQUAL_ENGINES)
    assert "As many KV heads as attention heads are assumed" in ran.words


def test_cross_attention_is_refused(tmp_path: Path, capsys: Capture) -> None:
    config = {"text_config": configs.TEXT | {"cross_attention_layers": [3, 8]}}
    ran = run_kvferry(capsys, "plan", write_config(tmp_path, config), *EQUAL_ENGINES)
    assert (ran.status, "layers that keep entries of images" in ran.err) == (1, True)
