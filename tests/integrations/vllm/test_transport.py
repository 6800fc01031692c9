"""The configured driver must reach the memory that the caches lie in. Needs no vLLM."""

from __future__ import annotations

import pytest

from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.device import make_transport


def test_driver_must_reach_the_memory() -> None:
    make_transport(Config(), {"cpu"}).close()
    with pytest.raises(ConfigError, match="'loopback' cannot reach tpu memory"):
        make_transport(Config(), {"cpu", "tpu"})
