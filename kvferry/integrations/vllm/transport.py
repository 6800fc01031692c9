"""Create the configured driver's transport, and refuse it if it cannot reach the caches' memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.core.transport import enter_nothing, registry
from kvferry.integrations.vllm.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvferry.core.transport import EnterThread, Transport
    from kvferry.integrations.vllm.config import Config


def make_transport(
    config: Config, memory: Iterable[str], enter: EnterThread = enter_nothing
) -> Transport:
    """Return a transport of the configured driver; the caller closes it.

    ``memory`` has the kinds of memory in which the caches are (``Region.kind``).

    Raises:
        ConfigError: The driver cannot reach one of the kinds of memory; names the installed drivers
            that can.
        DriverError: The driver cannot be used.
    """
    transport = registry.create(config.driver, config.driver_options, enter=enter)
    missing = sorted(set(memory) - transport.capabilities.memory)
    if not missing:
        return transport
    transport.close()
    able = [
        report.info.name
        for report in map(registry.describe, registry.installed())
        if report.capabilities is not None and report.capabilities.memory.issuperset(missing)
    ]
    raise ConfigError(
        f"driver {config.driver!r} cannot reach {', '.join(missing)} memory, where this engine's "
        "cache is: set kv_buffer_device 'cpu', which hands pages over by way of host memory, or "
        "driver to one that can; of the installed ones: "
        f"{', '.join(able) or 'none; kvferry drivers lists them, and why one does not work'}"
    )
