"""Every architecture that vLLM registers has a verdict, and vLLM's own interfaces agree with it.

The backends that can be imported here agree with what was read of their source, too.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.integrations.vllm.caches.cache_specs import SPECS
from tests.vllm.caches import architectures, census, coverage_page
from tests.vllm.caches.architectures import Architecture


@functools.cache
def found() -> dict[str, Architecture]:
    return {each.name: each for each in architectures.architectures()}


def test_every_registered_architecture_has_a_verdict() -> None:
    from vllm.model_executor.models.registry import _VLLM_MODELS

    assert set(_VLLM_MODELS) - set(found()) == set()
    assert set(found()) - set(_VLLM_MODELS) == set(), "vLLM has these no more"
    assert {each.verdict[0] for each in found().values()} <= set(coverage_page.VERDICTS)


def test_the_page_is_up_to_date() -> None:
    page = coverage_page.PAGE.read_text(encoding="utf-8")
    assert page == coverage_page.written(tuple(found().values())), f"run: {coverage_page.COMMAND}"


def test_every_kind_of_cache_has_a_name() -> None:
    kinds = {kind for each in found().values() for kind in each.kinds}
    assert kinds <= set(architectures.KINDS)
    assert set(architectures.GEOMETRY) <= set(SPECS)


def test_engines_that_are_named_are_run() -> None:
    """A test of whole engines, or what it makes them of, names the architecture."""
    root = Path(__file__).parents[3]
    sources = [*root.glob("tests/engines/*.py"), root / "examples" / "tiny_llama.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    for name, where in architectures.ENGINES.items():
        assert name in found()
        if where != "by hand":
            assert (root / "tests" / "engines" / where).exists()
            assert name in text or found()[name].part == architectures.DRAFTS, name


@pytest.mark.parametrize(
    ("name", "verdict", "caches"),
    [
        ("LlamaForCausalLM", "served, on engines", "keys and values"),
        ("DeepseekV3ForCausalLM", "served, by geometry", "latents"),
        ("Llama4ForCausalLM", "served, by geometry", "chunks, keys and values"),
        ("MambaForCausalLM", "served, by kind", "states (MAMBA1_ATTN)"),
        ("Qwen4ExpForCausalLM", "served, by kind", "rings"),
        ("DeepseekV41ForCausalLM", "moved whole", "rings"),
        ("DeepseekV4ForCausalLM", "served, by geometry", "latents"),
        ("Glm5NextForCausalLM", "served, by geometry", "rings"),
        ("InklingForCausalLM", "moved whole", "keys and values"),
        ("WhisperForConditionalGeneration", "refused", "cross attention"),
        ("PanguProMoEV2ForCausalLM", "refused", "sinks"),
        ("HrmTextForCausalLM", "refused", "a prefix LM"),
        ("BertModel", "refused", "none"),
        ("TransformersEmbeddingModel", "refused", "keys and values"),
        ("Eagle3LlamaForCausalLM", "draft", "keys and values"),
        ("UltravoxModel", "served, by kind", "those of its language model"),
        ("VoxtralRealtimeGeneration", "refused", "several entries per token"),
        ("LlavaNextForConditionalGeneration", "served, by kind", "those of its language model"),
    ],
)
def test_verdicts(name: str, verdict: str, caches: str) -> None:
    each = found()[name]
    assert each.verdict[0] == verdict, each
    assert caches in each.caches


def test_models_with_states_have_states() -> None:
    """As far as vLLM's classes can be imported here, their interfaces say the same."""
    from vllm.model_executor.models.registry import ModelRegistry, _ModelInfo, _try_load_model_cls

    asked = 0
    for name in (
        "MambaForCausalLM",
        "Qwen3NextForCausalLM",
        "Lfm2ForCausalLM",
        "LlamaForCausalLM",
        "JambaForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3ForCausalLM",
        "Zamba2ForCausalLM",
    ):
        cls = _try_load_model_cls(name, ModelRegistry.models[name])
        if cls is None:
            continue
        info = _ModelInfo.from_model_cls(cls)
        asked += 1
        assert info.has_inner_state == bool(found()[name].states), name
        assert info.is_attention_free == (found()[name].kinds == {"MambaSpec"}), name
    assert asked > 4


def test_scanned_names_and_orders_are_what_vllm_says() -> None:
    """Asked of those classes that can be imported here."""
    asked = 0
    for backend in census.backends():
        for path in backend.classes:
            cls = _imported(path)
            if cls is None:
                continue
            asked += 1
            assert cls.get_name() == backend.name
            orders = {order.name for order in cls.supported_kv_cache_layouts() or ()}
            assert orders <= set(backend.orders) or census.ANY[0] in backend.orders
    assert asked > 10


def _imported(path: str) -> Any:
    """``None`` for a module that needs what is not here."""
    module, _, name = path.rpartition(".")
    # On a processor without AVX-512, vLLM has loaded another library that defines the same
    # operators, and loading this one, too, ends the process.
    if module.endswith(".rocm") and "vllm._C" not in sys.modules:
        return None
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:  # noqa: BLE001 - kernels' modules fail in every way on a wrong processor
        return None
