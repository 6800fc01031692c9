"""Real engines that must not exchange pages, and engines that only have other names."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.fleet import RECOMPUTE
from tests.engines.steps import check_decoded, check_hand_over, check_refused, warning

pytestmark = pytest.mark.timeout(300)

LAYERS = 4
KEY = "field 'model.layers.0.self_attn.attn/k'"
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


@pytest.fixture(scope="module")
def lenient(start_engine: StartEngine) -> Engine:
    """Overrides what it may override, and computes what it cannot load."""
    extra = {"enforce_handshake_compat": False}
    return start_engine("lenient", "kv_consumer", extra=extra, transfer=RECOMPUTE)


def test_a_model_with_fewer_heads(
    reference: Engine,
    prefill: Engine,
    decode: Engine,
    lenient: Engine,
    start_engine: StartEngine,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    """Its requests fail, or are computed here; no other producer is affected."""
    reason = rf"{KEY}: local rank 0 holds \[0, 2\), and no remote rank has \[1, 2\)"
    model = altered(checkpoint, tmp_path / "model", num_key_value_heads=1)
    # The checkpoint's weights do not fit; nobody reads what comes of others.
    producer = start_engine("stranger", "kv_producer", model=model, load_format="dummy")
    wanted = prompt(70, seed=1)
    [first], [second] = producer.prefill(wanted), producer.prefill(wanted)
    check_refused(decode, wanted, first, "must not read from")
    completion = check_decoded(reference, lenient, wanted, second)
    assert re.search(reason, warning(lenient, completion.id))
    producer.close()
    for engine in (decode, lenient):
        check_hand_over(reference, prefill, engine, prompt(80, seed=1))


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
    [ticket] = producer.prefill(prompt(60))
    differs = f"model: '{checkpoint}' here, '{model}' there"
    refused = check_refused(decode, prompt(60), ticket, differs)
    remedy = "set enforce_handshake_compat to false on the engine that reads"
    assert remedy in warning(decode, refused.id)
    for length in (60, 61):
        check_hand_over(reference, producer, lenient, prompt(length))
    producer.close()
    [line] = [line for line in lenient.log().splitlines() if str(model) in line]
    assert f"although it differs in {differs}" in line


def test_static_scales(start_engine: StartEngine, checkpoint: Path, tmp_path: Path) -> None:
    """A quantised cache is read by whoever has the same scales, whatever its ranks and blocks."""
    quantised = {"kv_cache_dtype": "fp8"}
    half, whole = (altered(checkpoint, tmp_path / str(scale), scale=scale) for scale in (0.5, 1.0))
    ordinary = start_engine("ordinary", model=half, **quantised)
    extra = {"enforce_handshake_compat": False}
    decode = start_engine(
        "decode", "kv_consumer", extra=extra, model=half, block_size=64, **quantised
    )
    same = start_engine("same", "kv_producer", model=half, tensor_parallel_size=2, **quantised)
    other = start_engine("other", "kv_producer", model=whole, **quantised)
    check_hand_over(ordinary, same, decode, *(prompt(each, seed=2) for each in (33, 70, 200)))
    [ticket] = other.prefill(prompt(33, seed=2))
    reason = (
        f"{KEY}: encoding is 'fp8_e4m3, scales k 0.5, v 0.25' on local rank 0 and "
        "'fp8_e4m3, scales k 1.0, v 0.25' on remote rank 0"
    )
    check_refused(decode, prompt(33, seed=2), ticket, reason)
