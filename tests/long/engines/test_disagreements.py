"""Real engines that must not exchange pages, and engines that only have other names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import hand_over, pulled, texts

pytestmark = pytest.mark.timeout(300)

LAYERS = 4
KEY = "field 'model.layers.0.self_attn.attn/k'"


def altered(
    checkpoint: Path, folder: Path, *, scale: float | None = None, **config: object
) -> Path:
    """A copy of a checkpoint, its configuration changed; with ``scale``, of an fp8 cache's K."""
    copy = shutil.copytree(checkpoint, folder)
    if scale is not None:
        import numpy as np
        from safetensors.numpy import save_file

        scales = {"k": scale, "v": 0.25}
        save_file(
            {
                f"model.layers.{layer}.self_attn.{name}_scale": np.array(value, dtype=np.float32)
                for layer in range(LAYERS)
                for name, value in scales.items()
            },
            copy / "scales.safetensors",
        )
        config["quantization_config"] = STATIC_SCALES
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return copy


STATIC_SCALES = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "config_groups": {},
    "ignore": [],
    "quantization_status": "frozen",
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    },
}
"""Only the cache is quantised, and by scales that the checkpoint has."""

UNTRUE_WEIGHTS = {"load_format": "dummy"}
"""Those of the checkpoint do not fit a changed configuration; nobody reads what comes of them."""

STRANGERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fewer heads": (
        {"num_key_value_heads": 1},
        UNTRUE_WEIGHTS,
        rf"{KEY}: local rank 0 holds \[0, 2\), and no remote rank has \[1, 2\)",
    ),
    "other positions": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {},
        "rotary embedding: .*10000.* here, .*500000.* there",
    ),
    "a quantised cache": (
        {},
        {"kv_cache_dtype": "fp8"},
        "cache dtype: 'float32' here, 'fp8_e4m3' there",
    ),
}
"""What is another in a producer's checkpoint and arguments, and how that is called."""


@pytest.fixture(scope="module")
def lenient(start_engine: StartEngine) -> Iterator[Engine]:
    """Overrides what it may override, and computes what it cannot load."""
    engine = start_engine(
        "lenient",
        "kv_consumer",
        extra={"enforce_handshake_compat": False},
        transfer={"kv_load_failure_policy": "recompute"},
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers(
    reference: Engine,
    prefill: Engine,
    decode: Engine,
    lenient: Engine,
    start_engine: StartEngine,
    checkpoint: Path,
    tmp_path: Path,
    stranger: str,
) -> None:
    """Their requests fail, or are computed here; no other producer is affected."""
    config, arguments, reason = STRANGERS[stranger]
    model = altered(checkpoint, tmp_path / "model", **config)
    producer = start_engine("stranger", "kv_producer", model=model, **arguments)
    wanted, good = prompt(70, seed=1), prompt(80, seed=1)
    expected = texts(reference, wanted, good)
    tickets = producer.prefill(wanted) + producer.prefill(wanted)

    [failed, beside] = decode.generate(wanted, good, params=[tickets[0], *prefill.prefill(good)])
    assert (failed.finish_reason, failed.text, beside.text) == ("error", "", expected[1])
    assert "must not read from" in _warning(decode, failed.id)

    [again, beside] = lenient.generate(wanted, good, params=[tickets[1], *prefill.prefill(good)])
    assert [again.text, beside.text] == expected
    assert re.search(reason, _warning(lenient, again.id))

    producer.close()
    for engine in (decode, lenient):
        got, counters = hand_over(prefill, engine, good)
        assert got == expected[1:]
        assert pulled(counters) == len(good)


def test_another_name_of_the_same_model(
    reference: Engine,
    decode: Engine,
    lenient: Engine,
    start_engine: StartEngine,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """An operator may know better, and is told once what it is that he must know."""
    model = altered(checkpoint, tmp_path / "copy")
    producer = start_engine("renamed", "kv_producer", model=model)
    [refused] = decode.generate(prompt(60), params=producer.prefill(prompt(60)))
    assert refused.finish_reason == "error"
    line = _warning(decode, refused.id)
    assert f"model: '{checkpoint}' here, '{model}' there" in line
    assert "set enforce_handshake_compat to false on the engine that reads" in line
    for length in (60, 61):
        got, counters = hand_over(producer, lenient, prompt(length))
        assert got == texts(reference, prompt(length))
        assert pulled(counters) == length
    producer.close()
    [line] = [line for line in lenient.log().splitlines() if str(model) in line]
    assert f"although it differs in model: '{checkpoint}' here, '{model}' there" in line


def test_static_scales(start_engine: StartEngine, checkpoint: Path, tmp_path: Path) -> None:
    """A quantised cache is read by whoever has the same scales, whatever its ranks and blocks."""
    quantised = {"kv_cache_dtype": "fp8"}
    half = altered(checkpoint, tmp_path / "half", scale=0.5)
    whole = altered(checkpoint, tmp_path / "whole", scale=1.0)
    ordinary = start_engine("ordinary", model=half, **quantised)
    consumer = start_engine(
        "scaled-decode",
        "kv_consumer",
        extra={"enforce_handshake_compat": False},
        model=half,
        block_size=64,
        **quantised,
    )
    same, other = (
        start_engine(
            "scaled-prefill", "kv_producer", model=model, tensor_parallel_size=size, **quantised
        )
        for model, size in ((half, 2), (whole, 1))
    )
    prompts = [prompt(length, seed=2) for length in (33, 70, 200)]
    got, counters = hand_over(same, consumer, *prompts)
    assert got == texts(ordinary, *prompts)
    assert pulled(counters) == sum(map(len, prompts))
    [refused] = consumer.generate(prompts[0], params=other.prefill(prompts[0]))
    assert refused.finish_reason == "error"
    assert (
        f"{KEY}: encoding is 'fp8_e4m3, scales k 0.5, v 0.25' on local rank 0 and "
        "'fp8_e4m3, scales k 1.0, v 0.25' on remote rank 0"
    ) in _warning(consumer, refused.id)
    assert hand_over(same, consumer, prompts[1])[0] == texts(ordinary, prompts[1])
    for engine in (ordinary, consumer, same, other):
        engine.close()


def _warning(engine: Engine, request: str) -> str:
    lines = engine.log().splitlines()
    [line] = [line for line in lines if f"request {request}" in line and "WARNING" in line]
    return line
