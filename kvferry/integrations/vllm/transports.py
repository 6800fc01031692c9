"""The driver that the configuration names, if it can reach the caches' memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.core.transport import Transport
    from kvferry.integrations.vllm.config import Config


def make_transport(config: Config, device: str) -> Transport:
    """The driver's transport; the caller closes it."""
    from importlib.metadata import entry_points

    [ep] = entry_points(group="kvferry.drivers", name=config.driver)
    return ep.load()(**config.driver_options)
