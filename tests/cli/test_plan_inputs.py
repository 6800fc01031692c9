"""What ``kvferry plan`` refuses: config files, settings and layouts, each by name with a remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.plan.engines import EngineError, SettingsError, make_engine, parse
from kvferry.cli.plan.model import ModelError, read_model
from tests.cli import hybrid_configs as configs
from tests.cli.plan_command import LATENT, TINY, WINDOWS, Config, PlanCommand, write_config

SMALL_STATES = configs.LFM2 | {"num_key_value_heads": 1, "conv_dim": 1024}

FULL = "full_attention"
BOTH = ["sliding_attention", "chunked_attention"] * 2

WRONG_MODELS: list[tuple[Config, Config, str]] = [
    (TINY, {"num_hidden_layers": None}, "has no 'num_hidden_layers'"),
    (TINY, {"num_hidden_layers": "4"}, "'num_hidden_layers' is '4': Expected `int`, got `str`"),
    (TINY, {"num_attention_heads": 0}, "'num_attention_heads' is '0'"),
    (TINY, {"hidden_size": 4}, "'hidden_size' is '4': Expected `int` >= 8"),
    (TINY, {"torch_dtype": "int4"}, "unknown element type 'int4'"),
    (TINY, {"torch_dtype": 4}, "'dtype' is '4': Expected `str`"),
    (TINY, {"layer_types": [FULL]}, "it says what 1 of its 4 layers are"),
    (TINY, {"layer_types": [FULL, "linear_attention"] * 2}, "layers 1, 3 are 'linear_attention'"),
    (TINY, {"layer_types": [FULL, "rwkv"] * 2}, "layers 1, 3 are 'rwkv', and known are"),
    (TINY, {"layer_types": ["sliding_attention"] * 4}, "and no 'sliding_window'"),
    (TINY, {"model_type": "llama4", "no_rope_layers": [1, 0]}, "it says what 2 of its 4 layers"),
    (
        *(TINY, {"sliding_window": 8, "attention_chunk_size": 8, "layer_types": BOTH}),
        "has layers with windows and layers with chunks: such a cache",
    ),
    (TINY, {"attn_type_list": ["1"]}, "'attn_type_list' is \"['1']\": Expected `int`"),
    (TINY, {"model_type": "gemma4"}, "has model_type 'gemma4_text', so that its keys do not"),
    (TINY, {"hybrid_override_pattern": "M*M*"}, "layers 0, 2 are 'mamba', and gives no size of"),
    (TINY, {"layer_group_size": 8}, "has 'layer_group_size', so states, and no 'layer_types'"),
    (TINY, {"index_topk": 2048}, "has 'index_topk', so that its keys"),
    (TINY, {"is_encoder_decoder": True}, "has 'is_encoder_decoder', so that its keys"),
    (TINY, {"ssm_cfg": {"layer": 1}}, "describe both engines as JSON layouts instead"),
    (TINY, {"sliding_window": 20, "model_type": "new"}, "for model_type 'new': add 'layer_types'"),
    (configs.NEMOTRON_H, {"hybrid_override_pattern": "MX" * 26}, "51 are 'X', and known are"),
    (configs.GRANITE, {"mamba_expand": 0.01}, "a state has 20 channels, and 64 heads"),
    (configs.GRANITE, {"mamba_expand": "2"}, "'mamba_expand' is '2': Expected `float`"),
    (configs.GRANITE, {"mamba_d_head": "any"}, "'mamba_d_head' is 'any'"),
    (configs.FALCON_H1, {"mamba_d_head": "auto", "mamba_d_ssm": 8}, "8 channels, and 24 heads"),
    (configs.QWEN3_NEXT, {"linear_key_head_dim": None}, "has no 'linear_key_head_dim'"),
    (configs.QWEN3_NEXT, {"full_attention_interval": 0}, "'full_attention_interval' is '0'"),
    (configs.QWEN3_NEXT, {"mamba_ssm_dtype": "int4"}, "unknown element type 'int4'"),
    (configs.KIMI_LINEAR, {"linear_attn_config": 2}, "'linear_attn_config' is '2': Expected `obj"),
    ({}, {"text_config": {"model_type": "llama"}}, "'num_hidden_layers', which the size of a"),
]


@pytest.mark.parametrize(
    ("model", "change", "said"), WRONG_MODELS, ids=[said for *_, said in WRONG_MODELS]
)
def test_unsupported_models_are_refused(
    tmp_path: Path, model: Config, change: Config, said: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        read_model(Path(write_config(tmp_path, model | change)))


def test_packed_latents_beside_an_index_are_refused(tmp_path: Path) -> None:
    model = LATENT | {"model_type": "deepseek_v32", "index_topk": 64, "index_head_dim": 128}
    with pytest.raises(ModelError, match="float8_e4m3fn latents beside an index"):
        read_model(Path(write_config(tmp_path, model)), "fp8")


def test_unreadable_config_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"[1]", b"\xff\xfe{}", b"[" * 100_000):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match="is not the config of a model"):
            read_model(tmp_path)
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        read_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="--dtype names the unknown element type 'int4'"):
        read_model(tmp_path / "nowhere", "int4")


WRONG_SETTINGS = [
    (TINY | {"num_kv_shared_layers": 4}, "tp=1", "no layer has a cache of its own"),
    (TINY, "tq=2", "'tq=2': Object contains unknown field `tq`. Write key=value pairs"),
    (TINY, "layout=XYZ", "matching regex '^(LBHNC|LBNHC|LHBNC|BLHNC|BLNHC|BHLNC)$' - at `$.lay"),
    (TINY, "tp=0", "'tp=0': Expected `int` >= 1 - at `$.tp`"),
    (TINY, "tp=two", "'tp=two': Expected `int`, got `str` - at `$.tp`"),
    (TINY, "tp=", "'tp=': Expected `int`, got `str` - at `$.tp`"),
    (TINY, "tp=1,tp=2", "'tp=1,tp=2': a setting stands twice"),
    (TINY | {"num_attention_heads": 18, "num_key_value_heads": 9}, "tp=6", "9 KV heads"),
    (TINY, "pp=5", "pp=5 is more than the 4 layers"),
    (TINY, "tp=4,dcp=2", "there are 1"),
    (TINY, "tp=2,dcp=4", "dcp=4 does not divide tp=2"),
    (LATENT, "tp=2,dcp=2,interleave=3", "interleave=3 does not divide block_size=16"),
    (TINY, "kernel_block=5", "kernel_block=5 does not divide block_size=16"),
    (TINY, "kernel_block=8,layout=BLHNC", "so kernels cannot cut them: use block_size=8 or"),
    (TINY, "tp=1024,pp=1024", "more than 4096 ranks"),
    (configs.NEMOTRON_H, "tp=16", "tp=16 does not divide a state's 8 units of B"),
    (configs.QWEN3_NEXT | {"linear_num_value_heads": 1}, "tp=2", "divide a state's 1 heads"),
    (configs.GRANITE, "layout=LHBNC", "layout=LHBNC leaves no block in one piece"),
    # A state fits into 16 tokens, and vLLM rounds 24 up to a multiple of 16.
    (
        SMALL_STATES,
        "kernel_block=12,block_size=24",
        "kernel_block=12 does not divide block_size=32",
    ),
]


@pytest.mark.parametrize(
    ("model", "settings", "said"), WRONG_SETTINGS, ids=[said for *_, said in WRONG_SETTINGS]
)
def test_invalid_settings_are_refused(
    tmp_path: Path, model: Config, settings: str, said: str
) -> None:
    found = read_model(Path(write_config(tmp_path, model)))
    with pytest.raises((SettingsError, EngineError), match=re.escape(said)):
        make_engine(found, parse(settings), 4096)


def test_refusals_are_errors_of_the_command(plan: PlanCommand) -> None:
    for model, settings, said in (
        ({"a": 1}, "tp=1", "has no 'num_hidden_layers', which the size of a cache"),
        (TINY, "tq=2", "kvferry: --decode: 'tq=2': Object contains unknown field"),
        (TINY, "tp=3", "kvferry: tp=3 does not divide the 8 attention heads"),
        (SMALL_STATES, "kernel_block=12,block_size=24", "kvferry: --decode: kernel_block=12 does"),
        (TINY, "nowhere.json", "nowhere.json cannot be read: No such file"),
        (None, "tp=1", "name the model's config.json first"),
    ):
        assert said in plan.refusal(model, "tp=1", settings)


def test_settings_accept_dashes_and_lower_case() -> None:
    found = parse("block-size=32,layout=nhd")
    assert (found.block_size, found.layout) == (32, "LBNHC")


# Files with layouts.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ranks": []}, "length >= 1"),
        ({"coordinates": [{}, {}]}, "there are 2 coordinates, where 1 are needed"),
        ({"windows": [1]}, "there are 1 windows, where 2 are needed"),
        ({"windows": [-1, 0]}, "windows"),
        ({"ranks": 5}, "ranks"),
        ("nbytes", "of region 0, which has 100"),
        ("groups", "unlike numbers of groups"),
    ],
)
def test_malformed_engine_files_are_refused(
    plan: PlanCommand, change: dict[str, Any] | str, said: str
) -> None:
    files = plan.layouts(WINDOWS)
    content = json.loads(Path(files[0]).read_text())
    [rank] = content["ranks"]
    if change == "nbytes":
        rank["regions"][0]["nbytes"] = 100
    elif change == "groups":
        change = {"ranks": [rank, rank | {"groups": rank["groups"] * 2}], "coordinates": []}
    Path(files[0]).write_text(json.dumps(content | change if isinstance(change, dict) else content))
    assert said in plan.refusal(None, *files)


def test_layouts_have_their_own_element_types(plan: PlanCommand) -> None:
    said = plan.refusal(None, *plan.layouts(TINY), "--dtype", "fp8")
    assert "--dtype is for a model's config file" in said


def test_names_from_files_are_not_parsed_as_markup(plan: PlanCommand) -> None:
    files = plan.layouts(TINY)
    for file in map(Path, files):
        file.write_text(file.read_text().replace("layers.3.attn", "draft[/red][3]$x$"))
    assert "draft[/red][3]$x$" in plan.text(None, *files)
