"""The configured driver must reach the memory that the caches lie in. Needs no vLLM."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvferry.core.transport import Capabilities, Quiescence, registry
from kvferry.integrations.vllm.config import Config, ConfigError
from kvferry.integrations.vllm.device import make_transport


class Described:
    """Drivers that a test pretends are installed, each with the memory that it reaches."""

    memory: ClassVar[dict[str, frozenset[str] | None]] = {
        "loopback": frozenset({"cpu"}),
        "rdma": frozenset({"cpu", "cuda"}),
        "broken": None,
        "xpu-only": frozenset({"xpu"}),
    }

    @classmethod
    def installed(cls) -> list[registry.DriverInfo]:
        return [
            registry.DriverInfo(name=name, distribution=name, version="1", entry_point="a:b")
            for name in cls.memory
        ]

    @classmethod
    def describe(cls, info: registry.DriverInfo) -> registry.DriverReport:
        memory = cls.memory[info.name]
        if memory is None:
            return registry.DriverReport(info=info, reason="it is broken")
        capabilities = Capabilities(
            memory=memory,
            max_notification=1024,
            cancel=False,
            background_progress=True,
            quiescence=Quiescence.ALWAYS,
        )
        return registry.DriverReport(info=info, capabilities=capabilities)


def test_driver_that_reaches_the_memory() -> None:
    transport = make_transport(Config(), {"cpu"})
    transport.close()


@pytest.mark.parametrize(
    ("memory", "could"),
    [("cuda", "rdma"), ("tpu", "none; kvferry drivers lists them, and why one does not work")],
)
def test_driver_that_does_not(monkeypatch: pytest.MonkeyPatch, memory: str, could: str) -> None:
    monkeypatch.setattr(registry, "installed", Described.installed)
    monkeypatch.setattr(registry, "describe", Described.describe)
    with pytest.raises(ConfigError) as raised:
        make_transport(Config(), {memory})
    assert f"driver 'loopback' cannot reach {memory} memory" in str(raised.value)
    assert "set kv_buffer_device 'cpu'" in str(raised.value)
    assert str(raised.value).endswith(f"of the installed ones: {could}")
