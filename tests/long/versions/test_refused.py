"""Engines of two versions that cannot exchange pages: the error names what, and both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines.fleet import fleet
from tests.long.versions.environments import OTHERS, interpreter

pytestmark = pytest.mark.timeout(300)


def test_the_handshake_names_both_versions(checkpoint: Path, tmp_path: Path) -> None:
    with fleet(checkpoint, tmp_path) as engines:
        python = interpreter(OTHERS[0])
        prefill = engines.launch("prefill", "kv_producer", python=python, dtype="bfloat16")
        decode = engines.launch("decode", "kv_consumer")
        engines.wait_started()
        [completion] = decode.generate(prompt(65, 800), params=prefill.prefill(prompt(65, 800)))
        assert completion.finish_reason == "error"
        assert "dtype: 'float32' here, 'bfloat16' there" in decode.log()
        versions = [engine.run(vllm_version) for engine in (decode, prefill)]
        assert f"(vLLM: '{versions[0]}' here, '{versions[1]}' there)" in decode.log()


def vllm_version(engine: object) -> str:
    import vllm

    return str(vllm.__version__)
