"""What an engine says about itself in a handshake, from vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.security import Access
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.agreement import (
    FACTS,
    MAX_CHARACTERS,
    compatibility_facts,
    endpoint_options,
)
from kvferry.integrations.vllm.config import Config


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.32.0+cpu")


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def engine(
    *,
    cache_dtype: str = "auto",
    rope: Any = ROPE,
    speculative: object = None,
    **model: Any,
) -> Any:
    """A configuration, as far as it is looked at."""
    settings: dict[str, Any] = {
        "model": "tiny",
        "revision": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_config": SimpleNamespace(),
        "hf_overrides": {},
        "hf_text_config": SimpleNamespace(rope_parameters=rope),
        "max_model_len": 1024,
        "multimodal_config": None,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**settings | model),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        speculative_config=speculative,
    )


def drafting(method: str, model: str, *, caches: bool = True) -> Any:
    return SimpleNamespace(
        method=method,
        uses_draft_kv_cache=lambda: caches,
        draft_model_config=SimpleNamespace(model=model, revision="main"),
    )


def differ(one: Any, other: Any) -> set[str]:
    """The names that both engines know and differ in."""
    a, b = compatibility_facts(one), compatibility_facts(other)
    return {name for name in a.keys() & b.keys() if a[name] != b[name]}


def test_what_is_said() -> None:
    assert compatibility_facts(engine()) == {
        "dtype": "bfloat16",
        "quantization": "None",
        "cache dtype": "bfloat16",
        "rotary embedding": '{"rope_theta": 10000.0, "rope_type": "default"}',
        "model": "tiny",
        "revision": "None",
        "model overrides": "{}",
        "vLLM": "0.32.0+cpu",
    }


@pytest.mark.parametrize("enforce", [True, False])
def test_only_names_are_judgements(enforce: bool) -> None:
    names = {"model", "revision", "model overrides", "media", "draft model", "draft revision"}
    found = endpoint_options(Config(enforce_handshake_compat=enforce), Access()).judgements
    assert found.keys == names
    assert found.overridden is not enforce
    assert found.told == {"vLLM"}
    assert not FACTS.keys() & names


def media(**settings: object) -> Any:
    """An engine whose model takes images."""
    unset: dict[str, object] = {
        "mm_hasher_algorithm": "blake3",
        "media_io_kwargs": None,
        "mm_processor_kwargs": None,
    }
    return engine(multimodal_config=SimpleNamespace(**unset | settings))


def quantized(kernels: str) -> Any:
    """An engine whose checkpoint says how it is quantized."""
    said = SimpleNamespace(quantization_config={"quant_method": "awq"})
    return engine(hf_config=said, quantization=kernels)


DRAFTING = engine(speculative=drafting("eagle", "draft"))
NGRAM = engine(speculative=drafting("ngram", "tiny", caches=False))


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (engine(), engine(model="other"), {"model"}),
        (engine(), engine(revision="v2"), {"revision"}),
        (engine(), engine(dtype="torch.float16"), {"dtype", "cache dtype"}),
        (engine(), engine(quantization="awq"), {"quantization"}),
        (engine(), engine(cache_dtype="fp8"), {"cache dtype"}),
        (engine(), engine(rope=ROPE | {"rope_theta": 500000.0}), {"rotary embedding"}),
        (engine(), engine(rope=None), {"rotary embedding"}),
        (engine(), engine(hf_overrides={"sliding_window": 64}), {"model overrides"}),
        (engine(), engine(max_model_len=4096), set()),
        (engine(), engine(hf_overrides=dict), set()),
        (engine(), engine(cache_dtype="bfloat16"), set()),
        (engine(), NGRAM, set()),
        (engine(), DRAFTING, set()),
        # Kernels that read one checkpoint, and names of one format, are no difference.
        (quantized("awq"), quantized("awq_marlin"), set()),
        (quantized("awq"), engine(), {"quantization"}),
        (engine(cache_dtype="fp8"), engine(cache_dtype="fp8_e4m3"), set()),
        (engine(cache_dtype="fp8"), engine(cache_dtype="fp8_e5m2"), {"cache dtype"}),
        # vLLM's identifiers of images do not tell these settings apart.
        (media(), media(mm_processor_kwargs={"size": 7}), {"media"}),
        (media(), media(media_io_kwargs={"video": {"num_frames": 7}}), {"media"}),
        (media(), media(mm_hasher_algorithm="sha256"), {"media"}),
        (media(), media(mm_processor_kwargs={}, media_io_kwargs={}), set()),
        # Draft models are compared where both have caches of one.
        (DRAFTING, engine(speculative=drafting("eagle", "draft")), set()),
        (DRAFTING, engine(speculative=drafting("eagle3", "draft")), {"draft method"}),
        (DRAFTING, engine(speculative=drafting("eagle", "another")), {"draft model"}),
        (DRAFTING, NGRAM, set()),
    ],
)
def test_a_difference_has_a_name(one: Any, other: Any, names: set[str]) -> None:
    assert differ(one, other) == names


def test_factors_that_the_longest_prompt_chooses() -> None:
    """One engine turns keys by its long factors for all prompts, the other by its short ones."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "long_factor": [2.0]}
    short, longer = engine(rope=rope, max_model_len=4096), engine(rope=rope, max_model_len=4097)
    assert differ(short, longer) == {"rotary embedding"}
    assert not differ(short, engine(rope=rope, max_model_len=100))
    del rope["original_max_position_embeddings"]
    text = SimpleNamespace(rope_parameters=rope, original_max_position_embeddings=64)
    assert differ(engine(hf_text_config=text), engine(hf_text_config=text, max_model_len=64))


def test_long_values_are_cut_but_compared_whole() -> None:
    one, other = ("x" * 10000 + end for end in "ab")
    assert differ(engine(model=one), engine(model=other)) == {"model"}
    assert len(compatibility_facts(engine(model=one))["model"]) < MAX_CHARACTERS + 100
    longest = "m" * MAX_CHARACTERS
    assert compatibility_facts(engine(model=longest))["model"] == longest
