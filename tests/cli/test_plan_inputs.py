"""The inputs of ``kvferry plan``: valid and invalid config files, settings and layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvferry.cli.plan.engines import PlanSettings, make_engine
from kvferry.cli.plan.model import read_model
from kvferry.cli.plan.running import with_keys_of
from tests.cli.plan_command import LATENT, TINY, WINDOWS, make_plan, run_kvferry, write_config

Capture = pytest.CaptureFixture[str]

EQUAL_ENGINES = "--prefill=tp=1", "--decode=tp=1"
BYTES_PER_TOKEN = 4 * 4 * 32


def test_folder_stands_for_its_config_file(tmp_path: Path, capsys: Capture) -> None:
    write_config(tmp_path, TINY)
    found = make_plan(capsys, [str(tmp_path)], "tp=1", "tp=1", "--tokens=16")
    assert found["total"]["bytes"] == 16 * BYTES_PER_TOKEN


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(TINY | {"head_dim": 8, "hidden_size": 999}, id="a size of heads"),
        pytest.param({"text_config": TINY, "vision_config": {"hidden_size": 5}}, id="nested"),
        pytest.param({"thinker_config": {"text_config": TINY}}, id="nested twice"),
        pytest.param(
            {"n_layer": 4, "n_head": 8, "n_head_kv": 4, "n_embd": 64, "dtype": "float16"},
            id="other names",
        ),
        pytest.param(
            TINY
            | {"torch_dtype": "float32", "num_key_value_heads": 8, "multi_query": True}
            | {"num_hidden_layers": 8},
            id="one head for all",
        ),
        pytest.param(TINY | {"num_hidden_layers": 6, "num_kv_shared_layers": 2}, id="shared"),
        pytest.param(TINY | {"sliding_window": 8, "use_sliding_window": False}, id="no window"),
        pytest.param(
            TINY | {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 32},
            id="chunks",
        ),
        pytest.param(
            TINY | {"layers_block_type": ["attention"] * 4, "mamba_d_state": 4}, id="types"
        ),
        pytest.param(
            TINY | {"num_key_value_heads": None, "num_attention_heads": 4, "head_dim": 8},
            id="as many heads",
        ),
    ],
)
def test_equivalent_config_files_give_the_same_bytes(
    tmp_path: Path, capsys: Capture, content: dict[str, Any]
) -> None:
    found = make_plan(capsys, [write_config(tmp_path, content)], "tp=1", "tp=1", "--tokens=16")
    assert found["total"]["bytes"] == 16 * BYTES_PER_TOKEN


@pytest.mark.parametrize(
    ("content", "copies"),
    [
        pytest.param({"sliding_window": 20, "model_type": "mixtral"}, 4 * 2, id="all layers"),
        pytest.param({"sliding_window": 20, "sliding_window_pattern": 4}, 3 * 2 + 4, id="pattern"),
        pytest.param(
            {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 3}
            | {"model_type": "qwen2"},
            3 * 4 + 2,
            id="from a layer on",
        ),
        pytest.param(
            {"sliding_window": 20, "model_type": "gemma2"}, 2 * (2 + 4), id="default pattern"
        ),
        pytest.param(
            {"sliding_window": 20, "sliding_window_pattern": "GL"}, 2 * (2 + 4), id="letters"
        ),
        pytest.param(
            {"attention_chunk_size": 32, "model_type": "llama4_text"}, 3 * 0 + 4, id="chunk's end"
        ),
        pytest.param(
            {"attention_chunk_size": 48, "model_type": "llama4_text"}, 3 * 1 + 4, id="in a chunk"
        ),
    ],
)
def test_windows_read_only_their_pages(
    tmp_path: Path, capsys: Capture, content: dict[str, Any], copies: int
) -> None:
    model = write_config(tmp_path, TINY | content)
    # A window of 20 tokens before token 64 has tokens 45 to 63, in 2 of the 4 pages.
    assert make_plan(capsys, [model], "tp=1", "tp=1", "--tokens=64")["total"]["copies"] == copies


GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27},
    "torch_dtype": "bfloat16",
}
"""As published: the pattern of windows is that of the model's class."""


@pytest.mark.parametrize(
    "text_model", [{"model_type": "gemma3_text"}, {"model_type": None}], ids=["named", "unnamed"]
)
def test_windows_have_the_pattern_of_the_models_class(
    tmp_path: Path, capsys: Capture, text_model: dict[str, Any]
) -> None:
    content = GEMMA_3_27B | {"text_config": GEMMA_3_27B["text_config"] | text_model}
    if not text_model["model_type"]:
        del content["text_config"]["model_type"]
    model = write_config(tmp_path, content)
    ran = run_kvferry(capsys, "plan", model, *EQUAL_ENGINES, "--tokens=32768")
    assert ran.status == 0
    assert "layers 0-4, 6-10, 12-16, 18-22, 24-28, 30-34, 36-40, 42-46, 48-52, 54-58, 60-61 look "
    assert "look back 1,024 tokens" in ran.words
    assert "The file leaves out 'sliding_window_pattern': the default of model_type" in ran.words
    assert "takes 2.91 GiB" in ran.words


def test_layers_with_chunks_are_named(tmp_path: Path, capsys: Capture) -> None:
    content = TINY | {"model_type": "llama4_text", "head_dim": 8}
    ran = run_kvferry(capsys, "plan", write_config(tmp_path, content), *EQUAL_ENGINES)
    assert "layers 0-2 look back to the start of a chunk of 8,192 tokens" in ran.words


@pytest.mark.parametrize("name", [{}, {"model_type": "new"}], ids=["no name", "new name"])
def test_windows_of_unknown_models_are_refused_with_the_key_to_add(
    tmp_path: Path, capsys: Capture, name: dict[str, str]
) -> None:
    content = TINY | {"sliding_window": 20} | name
    ran = run_kvferry(capsys, "plan", write_config(tmp_path, content), *EQUAL_ENGINES)
    assert ran.status == 1
    assert f"not known for model_type {name.get('model_type', '')!r}: add 'layer_types'" in ran.err
    known = content | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    assert make_plan(capsys, [write_config(tmp_path, known)], "tp=1", "tp=1")["total"]


INDEXED: dict[str, Any] = LATENT | {
    "model_type": "deepseek_v32",
    "index_topk": 64,
    "index_head_dim": 128,
}


@pytest.mark.parametrize(
    ("layout", "kernel"),
    [("LBNHC", 0), ("LBNHC", 8), ("LBHNC", 8), ("LHBNC", 0), ("BLHNC", 0), ("BHLNC", 0)],
)
def test_indexes_are_moved_with_latents(
    tmp_path: Path, capsys: Capture, layout: str, kernel: int
) -> None:
    model = [write_config(tmp_path, INDEXED | {"index_topk_pattern": "FSSF"})]
    side = f"layout={layout}" + f",kernel_block={kernel}" * bool(kernel)
    found = make_plan(capsys, model, f"tp=2,{side}", side, "--tokens=64")
    assert found["total"]["bytes"] == 64 * (4 * 64 + 2 * 132)


def test_layers_with_an_index_are_named(tmp_path: Path, capsys: Capture) -> None:
    ran = run_kvferry(capsys, "plan", write_config(tmp_path, INDEXED), *EQUAL_ENGINES)
    assert "one latent per token (latent 32, bfloat16): 784 B per token" in ran.words
    assert "layers 0-3 have an index: 132 bytes per token each" in ran.words
    assert "layers 0-3, latent and index latent and index scale" in ran.words


def test_indexes_get_the_keys_of_a_running_engine(tmp_path: Path) -> None:
    computed = make_engine(read_model(Path(write_config(tmp_path, INDEXED))), PlanSettings(), 16)
    [layout] = computed.ranks
    keys = {
        f.key: f"model.{f.key}".replace(".indexer/", ".attn.indexer.k_cache/")
        for f in layout.fields
    }
    fields = tuple(structs.replace(f, key=keys[f.key]) for f in layout.fields)
    running = replace(computed, ranks=(replace(layout, fields=fields),))
    assert with_keys_of(computed, running) == running


def test_packed_latents_beside_an_index_are_refused(tmp_path: Path, capsys: Capture) -> None:
    model = write_config(tmp_path, INDEXED)
    ran = run_kvferry(capsys, "plan", model, *EQUAL_ENGINES, "--dtype=fp8")
    assert (ran.status, "float8_e4m3fn latents beside an index" in ran.err) == (1, True)


def test_list_of_attention_types_is_no_state(tmp_path: Path, capsys: Capture) -> None:
    model = [write_config(tmp_path, TINY | {"attn_type_list": [1] * 4})]
    found = make_plan(capsys, model, "tp=1", "tp=1", "--tokens=16")
    assert found["total"]["bytes"] == 16 * BYTES_PER_TOKEN


def test_infinity_in_a_config_file_is_read(tmp_path: Path, capsys: Capture) -> None:
    model = [write_config(tmp_path, TINY | {"time_step_limit": [0.0, float("inf")]})]
    assert make_plan(capsys, model, "tp=1", "tp=1")["total"]


def test_element_types_set_the_bytes(tmp_path: Path, capsys: Capture) -> None:
    model = [write_config(tmp_path, TINY)]
    for name, nbytes in (("fp8", 1), ("auto", 2), ("torch.float32", 4)):
        found = make_plan(capsys, model, "tp=1", "tp=1", "--tokens=16", f"--dtype={name}")
        assert found["total"]["bytes"] == 16 * BYTES_PER_TOKEN * nbytes // 2


WRONG_MODELS = [
    ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"num_hidden_layers": "4"}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"hidden_size": None}, "neither 'head_dim' nor 'hidden_size'"),
    ({"torch_dtype": "int4"}, "unknown element type 'int4'"),
    ({"layer_types": ["full_attention"]}, "'layer_types' has 1 entries for 4 layers"),
    (
        {"layer_types": ["full_attention", "linear_attention"] * 2},
        "layers 1, 3 are 'linear_attention'",
    ),
    (
        {"layer_types": ["sliding_attention"] * 4},
        "has 'sliding_attention', and the file has no 'sliding_window'",
    ),
    ({"attn_type_list": [0, 1] * 2}, "layers 0, 2 are 'linear_attention', which have states"),
    (
        {"model_type": "llama4", "no_rope_layers": [1, 0]},
        "'no_rope_layers' has 2 entries for 4 layers",
    ),
    ({"attn_type_list": [1]}, "'attn_type_list' has 1 entries for 4 layers"),
    ({"model_type": "gemma4"}, "has model_type 'gemma4_text', layers with heads of two sizes"),
    (
        {"hybrid_override_pattern": "M*M*"},
        "layers 0, 2 are 'mamba', which have states, and the file has none of the keys",
    ),
    ({"layer_types": ["full_attention", "rwkv"] * 2}, "layers 1, 3 are 'rwkv', and known are"),
    ({"layer_group_size": 8}, "has 'layer_group_size', so the model has states"),
    ({"mamba_d_conv": 4}, "has 'mamba_d_conv', so the model has states"),
    ({"index_topk": 2048}, "has 'index_topk', an index in every layer, which is drawn for"),
    ({"is_encoder_decoder": True}, "only decoders are drawn"),
    (LATENT | {"is_encoder_decoder": True}, "an encoder and a decoder ('is_encoder_decoder')"),
    ({"hidden_size": 4}, "hidden_size=4 is less than num_attention_heads=8"),
    ({"num_kv_shared_layers": 4}, "no layer has a cache of its own"),
]


@pytest.mark.parametrize(("content", "said"), WRONG_MODELS, ids=[said for _, said in WRONG_MODELS])
def test_unsupported_models_are_refused(
    tmp_path: Path, capsys: Capture, content: dict[str, Any], said: str
) -> None:
    ran = run_kvferry(capsys, "plan", write_config(tmp_path, TINY | content), *EQUAL_ENGINES)
    assert ran.status == 1
    assert said in ran.err
    assert ran.err.startswith("kvferry: ")


def test_hybrids_are_referred_to_layouts(tmp_path: Path, capsys: Capture) -> None:
    ran = run_kvferry(
        capsys, "plan", write_config(tmp_path, TINY | {"ssm_cfg": {"layer": 1}}), *EQUAL_ENGINES
    )
    assert "describe both engines as JSON layouts instead" in ran.err


WRONG_SETTINGS = [
    (TINY, "tq=2", "unknown setting 'tq': did you mean 'tp'?"),
    (TINY, "blocksize=2", "did you mean 'block_size'?"),
    (TINY, "layout=HNDD", "unknown layout 'HNDD': did you mean 'HND'?"),
    (TINY, "layout=XYZ", "unknown layout 'XYZ'; allowed are LBHNC, LBNHC, LHBNC"),
    (TINY, "tp=0", "tp=0 must be a number in 1 to 1024"),
    (TINY, "tp=two", "tp=two must be a number"),
    (TINY, "tp=", "'tp' has no value"),
    (TINY, "tp=1,tp=2", "'tp' stands twice"),
    (TINY, "tp=3", "tp=3 does not divide the 8 attention heads"),
    (
        TINY | {"num_attention_heads": 18, "num_key_value_heads": 9, "head_dim": 8},
        "tp=6",
        "9 KV heads",
    ),
    (TINY, "pp=5", "pp=5 is more than the 4 layers"),
    (TINY, "tp=4,dcp=2", "there are 1"),
    (TINY, "tp=2,dcp=4", "dcp=4 does not divide tp=2"),
    (LATENT, "tp=2,dcp=2,interleave=3", "interleave=3 does not divide block_size=16"),
    (TINY, "kernel_block=5", "kernel_block=5 does not divide block_size=16"),
    (TINY, "kernel_block=8,layout=BLHNC", "so kernels cannot cut them: use block_size=8 or"),
    (TINY, "tp=1024,pp=1024", "more than 4096 ranks"),
    (TINY, "nowhere.json", "nowhere.json cannot be read: No such file"),
]


@pytest.mark.parametrize(
    ("content", "settings", "said"), WRONG_SETTINGS, ids=[said for *_, said in WRONG_SETTINGS]
)
def test_invalid_settings_are_refused(
    tmp_path: Path, capsys: Capture, content: dict[str, Any], settings: str, said: str
) -> None:
    model = write_config(tmp_path, content)
    ran = run_kvferry(capsys, "plan", model, "--prefill=tp=1", f"--decode={settings}")
    assert ran.status == 1
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_settings_without_model_are_refused(tmp_path: Path, capsys: Capture) -> None:
    ran = run_kvferry(capsys, "plan", *EQUAL_ENGINES)
    assert (ran.status, "name the model's config.json first" in ran.err) == (1, True)


def test_settings_accept_dashes_and_lower_case(tmp_path: Path, capsys: Capture) -> None:
    model = write_config(tmp_path, TINY)
    ran = run_kvferry(capsys, "plan", model, "--prefill=block-size=32,layout=nhd", "--decode=tp=1")
    assert "block_size=32,layout=LBNHC" in ran.words


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not the config of a model"),
        (b"[1]", "is not the config of a model"),
        (b"\xff\xfe{}", "is not the config of a model"),
        (b"[" * 100_000, "is not the config of a model"),
        (b"{}", "does not say what a KV cache is made of"),
    ],
)
def test_malformed_config_files_are_refused(
    tmp_path: Path, capsys: Capture, content: bytes, said: str
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    ran = run_kvferry(capsys, "plan", str(tmp_path), *EQUAL_ENGINES)
    assert (ran.status, said in ran.err) == (1, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ranks": []}, "length >= 1"),
        ({"coordinates": [{}, {}]}, "2 coordinates for 1 ranks"),
        ({"windows": [1, 2]}, "2 windows for 1 groups"),
        ({"windows": [-1]}, "windows"),
        ({"ranks": 5}, "ranks"),
    ],
)
def test_malformed_engine_files_are_refused(
    tmp_path: Path, capsys: Capture, change: dict[str, Any], said: str
) -> None:
    make_plan(capsys, [write_config(tmp_path, TINY)], "tp=1", "tp=1", f"--write-layouts={tmp_path}")
    file = tmp_path / "prefill.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    ran = run_kvferry(capsys, "plan", f"--prefill={file}", f"--decode={tmp_path / 'decode.json'}")
    assert (ran.status, said in ran.err) == (1, True)


def test_layout_outside_its_region_is_refused(tmp_path: Path, capsys: Capture) -> None:
    make_plan(
        capsys, [write_config(tmp_path, WINDOWS)], "tp=1", "tp=1", f"--write-layouts={tmp_path}"
    )
    file = tmp_path / "prefill.json"
    content = json.loads(file.read_text())
    content["ranks"][0]["regions"][0]["nbytes"] = 100
    file.write_text(json.dumps(content))
    ran = run_kvferry(capsys, "plan", f"--prefill={file}", f"--decode={tmp_path / 'decode.json'}")
    assert ran.status == 1
    assert "of region 0, which has 100" in ran.err


def test_unwritable_layouts_are_reported(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "taken").write_text("")
    model = write_config(tmp_path, TINY)
    ran = run_kvferry(
        capsys, "plan", model, *EQUAL_ENGINES, f"--write-layouts={tmp_path / 'taken'}"
    )
    assert (ran.status, "cannot be written" in ran.err) == (1, True)


def test_names_from_files_are_not_parsed_as_markup(tmp_path: Path, capsys: Capture) -> None:
    make_plan(capsys, [write_config(tmp_path, TINY)], "tp=1", "tp=1", f"--write-layouts={tmp_path}")
    for name in ("prefill", "decode"):
        file = tmp_path / f"{name}.json"
        file.write_text(file.read_text().replace("layers.3.attn", "draft[/red][3]$x$"))
    sides = [f"--{name}={tmp_path / name}.json" for name in ("prefill", "decode")]
    assert "draft[/red][3]$x$" in run_kvferry(capsys, "plan", *sides).words
