"""The configured driver must reach the memory that the caches lie in. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.transport import registry
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.device import make_transport

REACHED: dict[str, set[str] | None] = {
    "loopback": {"cpu"},
    "rdma": {"cpu", "cuda"},
    "broken": None,
    "xpu-only": {"xpu"},
}
"""Drivers that a test pretends are installed, each with the memory that it reaches."""


def described(name: str) -> Any:
    memory = REACHED[name]
    capabilities = None if memory is None else SimpleNamespace(memory=memory)
    return SimpleNamespace(info=SimpleNamespace(name=name), capabilities=capabilities)


def test_driver_that_reaches_the_memory() -> None:
    transport = make_transport(Config(), {"cpu"})
    transport.close()


@pytest.mark.parametrize(
    ("memory", "could"),
    [("cuda", "rdma"), ("tpu", "none; kvferry drivers lists them, and why one does not work")],
)
def test_driver_that_does_not(monkeypatch: pytest.MonkeyPatch, memory: str, could: str) -> None:
    monkeypatch.setattr(registry, "installed", lambda: list(REACHED))
    monkeypatch.setattr(registry, "describe", described)
    with pytest.raises(ConfigError) as raised:
        make_transport(Config(), {memory})
    assert f"driver 'loopback' cannot reach {memory} memory" in str(raised.value)
    assert "set kv_buffer_device 'cpu'" in str(raised.value)
    assert str(raised.value).endswith(f"of the installed ones: {could}")
