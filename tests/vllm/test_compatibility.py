"""What an engine says about itself in a handshake, from vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.compatibility import (
    FACTS,
    JUDGEMENTS,
    MAX_CHARACTERS,
    compatibility_facts,
    judgements,
)
from kvferry.integrations.vllm.config import Config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports


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
    found = judgements(Config(enforce_handshake_compat=enforce))
    assert (found.keys, found.overridden, found.told) == (names, not enforce, {"vLLM"})
    assert set(JUDGEMENTS) == names
    assert not FACTS.keys() & names


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model": "other"}, {"model"}),
        ({"revision": "v2"}, {"revision"}),
        ({"dtype": "torch.float16"}, {"dtype", "cache dtype"}),
        ({"quantization": "awq"}, {"quantization"}),
        ({"cache_dtype": "fp8"}, {"cache dtype"}),
        ({"rope": ROPE | {"rope_theta": 500000.0}}, {"rotary embedding"}),
        ({"rope": None}, {"rotary embedding"}),
        ({"hf_overrides": {"sliding_window": 64}}, {"model overrides"}),
        ({"max_model_len": 4096}, set()),
        ({"hf_overrides": dict}, set()),
        ({"cache_dtype": "bfloat16"}, set()),
        ({"speculative": drafting("ngram", "tiny", caches=False)}, set()),
        ({"speculative": drafting("eagle", "draft")}, set()),
    ],
)
def test_a_difference_has_a_name(change: dict[str, Any], names: set[str]) -> None:
    assert differ(engine(), engine(**change)) == names


def test_kernels_that_read_one_checkpoint_are_no_difference() -> None:
    declared = SimpleNamespace(quantization_config={"quant_method": "awq"})
    one, other = (
        engine(hf_config=declared, quantization=kernels) for kernels in ("awq", "awq_marlin")
    )
    assert not differ(one, other)
    assert differ(one, engine()) == {"quantization"}


def media(**settings: object) -> Any:
    """An engine whose model takes images."""
    unset: dict[str, object] = {
        "mm_hasher_algorithm": "blake3",
        "media_io_kwargs": None,
        "mm_processor_kwargs": None,
    }
    return engine(multimodal_config=SimpleNamespace(**unset | settings))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"mm_processor_kwargs": {"size": 7}}, {"media"}),
        ({"media_io_kwargs": {"video": {"num_frames": 7}}}, {"media"}),
        ({"mm_hasher_algorithm": "sha256"}, {"media"}),
        ({"mm_processor_kwargs": {}, "media_io_kwargs": {}}, set()),
    ],
)
def test_engines_must_make_the_same_of_an_image(change: dict[str, Any], names: set[str]) -> None:
    """vLLM's identifiers of images do not tell these settings apart."""
    assert differ(media(), media(**change)) == names


def test_two_names_of_one_cache_format_are_one() -> None:
    assert not differ(engine(cache_dtype="fp8"), engine(cache_dtype="fp8_e4m3"))
    assert differ(engine(cache_dtype="fp8"), engine(cache_dtype="fp8_e5m2")) == {"cache dtype"}


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (drafting("eagle", "draft"), set()),
        (drafting("eagle3", "draft"), {"draft method"}),
        (drafting("eagle", "another"), {"draft model"}),
        (drafting("ngram", "tiny", caches=False), set()),
    ],
)
def test_draft_models_are_compared_where_both_have_caches_of_one(
    other: Any, names: set[str]
) -> None:
    mine = engine(speculative=drafting("eagle", "draft"))
    assert differ(mine, engine(speculative=other)) == names


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
