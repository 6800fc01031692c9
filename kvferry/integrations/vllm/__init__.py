"""The vLLM connector: ``--kv-transfer-config '{"kv_connector": "KVFerryConnector", ...}'``.

vLLM imports this module in every process, also in those that transfer nothing, so the connector is
imported only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.integrations.vllm.connector import KVFerryConnector

__all__ = ["KVFerryConnector"]


def __getattr__(name: str) -> object:
    if name == "KVFerryConnector":
        from kvferry.integrations.vllm.connector import KVFerryConnector

        return KVFerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
