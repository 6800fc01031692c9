"""``kvferry plan`` reads the configs of models: attention, windows, indexes, states, multimodal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from kvferry.cli.plan.engines import PlanSettings, make_engine, parse
from kvferry.cli.plan.estimate import estimate_reads
from kvferry.cli.plan.model import read_model
from kvferry.cli.plan.sides import with_keys_of
from tests.cli import hybrid_configs as configs
from tests.cli.plan_command import LATENT, TINY, Config, PlanCommand, write_config

BYTES_PER_TOKEN = 4 * 4 * 32  # of ``TINY``
VISION: Config = {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152}


def figures_of(
    folder: Path,
    config: Config,
    prefill: str = "tp=1",
    decode: str = "tp=1",
    *,
    tokens: int = 16,
    dtype: str | None = None,
) -> dict[str, int]:
    """Return the figures of a request between two engines of the model of a config file."""
    model = read_model(Path(write_config(folder, config)), dtype)
    one, other = (make_engine(model, parse(side), tokens) for side in (prefill, decode))
    return estimate_reads(one, other, tokens).total


UNTYPED = TINY | {"torch_dtype": None}
EQUIVALENT: dict[str, Config] = {
    "a size of heads": TINY | {"head_dim": 8, "hidden_size": 999},
    "nested": {"text_config": TINY, "vision_config": VISION},
    "other names": {"n_layer": 4, "n_head": 8, "n_head_kv": 4, "n_embd": 64, "dtype": "float16"},
    "one head for all": TINY
    | {"torch_dtype": "float32", "num_key_value_heads": 8, "multi_query": True}
    | {"num_hidden_layers": 8},
    "shared": TINY | {"num_hidden_layers": 6, "num_kv_shared_layers": 2},
    "no window": TINY | {"sliding_window": 8, "use_sliding_window": False},
    "chunks": TINY | {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 32},
    "types": TINY | {"layers_block_type": ["attention"] * 4, "mamba_d_state": 4},
    "as many heads": TINY | {"num_key_value_heads": None, "num_attention_heads": 4, "head_dim": 8},
    "list of attention types": TINY | {"attn_type_list": [1] * 4},
    "infinity": TINY | {"time_step_limit": [0.0, float("inf")]},
    "llm_config": {"llm_config": TINY, "vision_config": VISION},
    "language_config": {"language_config": TINY, "vision_config": VISION},
    "thinker_config": {
        "thinker_config": {"text_config": TINY, "audio_config": VISION},
        "talker_config": {"text_config": VISION},
    },
    "element type of the top level": {"text_config": UNTYPED, "dtype": "bfloat16"},
    "element type of both levels": {
        "text_config": UNTYPED | {"dtype": "float32"},
        "torch_dtype": "bfloat16",
    },
    "head size 0": {"text_config": TINY | {"head_dim": 0}},
}


@pytest.mark.parametrize("model", EQUIVALENT.values(), ids=EQUIVALENT)
def test_equivalent_config_files_give_the_same_bytes(tmp_path: Path, model: Config) -> None:
    assert figures_of(tmp_path, model)["bytes"] == 16 * BYTES_PER_TOKEN


@pytest.mark.parametrize(("name", "nbytes"), [("fp8", 1), ("auto", 2), ("torch.float32", 4)])
def test_element_types_set_the_bytes(tmp_path: Path, name: str, nbytes: int) -> None:
    found = figures_of(tmp_path, TINY, dtype=name)
    assert found["bytes"] == 16 * BYTES_PER_TOKEN * nbytes // 2


# Windows.


WINDOW: Config = {"sliding_window": 20}


@pytest.mark.parametrize(
    ("content", "copies"),
    [
        (WINDOW | {"model_type": "mixtral"}, 4 * 2),
        (WINDOW | {"sliding_window_pattern": 4}, 3 * 2 + 4),
        (
            WINDOW | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
            3 * 4 + 2,
        ),
        (WINDOW | {"model_type": "gemma2"}, 2 * (2 + 4)),  # the class's pattern
        (WINDOW | {"sliding_window_pattern": "GL"}, 2 * (2 + 4)),
        # At the end of a chunk nothing is read, and within one its pages.
        ({"attention_chunk_size": 32, "model_type": "llama4_text"}, 3 * 0 + 4),
        ({"attention_chunk_size": 48, "model_type": "llama4_text"}, 3 * 1 + 4),
    ],
)
def test_windows_read_only_their_pages(tmp_path: Path, content: Config, copies: int) -> None:
    # a window of 20 tokens before token 64 has tokens 45 to 63, in 2 of the 4 pages.
    assert figures_of(tmp_path, TINY | content, tokens=64)["copies"] == copies


# Indexes.


INDEXED = LATENT | {"model_type": "deepseek_v32", "index_topk": 64, "index_head_dim": 128}


@pytest.mark.parametrize(
    ("layout", "kernel"),
    [("LBNHC", 0), ("LBNHC", 8), ("LBHNC", 8), ("LHBNC", 0), ("BLHNC", 0), ("BHLNC", 0)],
)
def test_indexes_are_moved_with_latents(tmp_path: Path, layout: str, kernel: int) -> None:
    side = f"layout={layout}" + f",kernel_block={kernel}" * bool(kernel)
    model = INDEXED | {"index_topk_pattern": "FSSF"}
    found = figures_of(tmp_path, model, f"tp=2,{side}", side, tokens=64)
    assert found["bytes"] == 64 * (4 * 64 + 2 * 132)


def test_indexes_get_the_keys_of_a_running_engine(tmp_path: Path) -> None:
    computed = make_engine(read_model(Path(write_config(tmp_path, INDEXED))), PlanSettings(), 16)
    [layout] = computed.ranks
    fields = tuple(
        structs.replace(f, key=f"model.{f.key}".replace(".indexer/", ".attn.indexer.k_cache/"))
        for f in layout.fields
    )
    running = replace(computed, ranks=(replace(layout, fields=fields),))
    assert with_keys_of(computed, running) == running


# States.

TYPES = {"M": "mamba", "*": "attention", "-": "mlp"}
NEMOTRON_H_BY_TYPES = configs.NEMOTRON_H | {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": None,
    "layers_block_type": [TYPES[one] for one in configs.NEMOTRON_H["hybrid_override_pattern"]],
}
HYBRIDS = [
    # config, layers with attention, their bytes per token; layers with a state, its bytes
    (configs.QWEN3_5, 8, 4096, 24, 8192 * 3 * 2 + 32 * 128 * 128 * 4),
    (configs.NEMOTRON_H, 4, 4096, 24, 10240 * 3 * 2 + 128 * 64 * 128 * 4),
    (NEMOTRON_H_BY_TYPES, 4, 4096, 24, 10240 * 3 * 2 + 128 * 64 * 128 * 4),
]
"""Others are compared with vLLM in ``tests/vllm/test_plan_vllm.py``."""


@pytest.mark.parametrize(("model", "attending", "token", "stateful", "state"), HYBRIDS)
def test_bytes_of_hybrids(
    tmp_path: Path, model: Config, attending: int, token: int, stateful: int, state: int
) -> None:
    # a page of the block size that vLLM chooses has room for a state.
    block = 16 * -(-state // (16 * token))
    found = figures_of(tmp_path, model, tokens=block)
    assert found["bytes"] == attending * block * token + stateful * state


def test_folder_and_list_of_layers_are_read(tmp_path: Path) -> None:
    listed = configs.GRANITE | {"layer_types": None, "attn_layer_indices": [5, 15, 25, 35]}
    same = read_model(Path(write_config(tmp_path, listed)))
    write_config(tmp_path, configs.GRANITE)
    assert read_model(tmp_path) == same


# What is printed of a model.

GEMMA3: Config = TINY | WINDOW | {"num_hidden_layers": 14}
NAMED: Config = {"text_config": GEMMA3 | {"model_type": "gemma3_text"}}
PRINTED: list[tuple[Config, str]] = [
    (NAMED, "layers 0-4, 6-10, 12-13 look back 20 tokens"),
    (NAMED, "The file leaves out 'sliding_window_pattern': the default of model_type 'gemma3_te"),
    ({"model_type": "gemma3", "text_config": GEMMA3}, "layers 0-4, 6-10, 12-13 look back 20 "),
    (
        TINY | {"model_type": "llama4_text", "head_dim": 8},
        "layers 0-2 look back to the start of a chunk of 8,192 tokens",
    ),
    (INDEXED, "one latent per token (latent 32, bfloat16): 784 B per token"),
    (INDEXED, "layers 0-3 have an index: 132 bytes per token each"),
    (INDEXED, "layers 0-3, latent, index latent, index scale"),
    (configs.QWEN3_NEXT, "12 layers, 2 KV heads (k 256 + v 256, bfloat16): 24 KiB per token"),
    (configs.QWEN3_NEXT, "44-46 have a state: 1.05 MiB each"),
    (configs.QWEN3_NEXT, "prefill 2 ranks tp=2,pp=1,block_size=544,layout=LBNHC"),
    (configs.QWEN3_NEXT, "36 of layers 0-46, conv/q, conv/k, conv/v, ssm"),
]


@pytest.mark.parametrize(("config", "part"), PRINTED, ids=[part for _, part in PRINTED])
def test_table_names_what_differs_between_layers(
    plan: PlanCommand, config: Config, part: str
) -> None:
    assert part in plan.text(config, "tp=2", "tp=1")
