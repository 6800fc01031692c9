"""``--kv-transfer-config`` as keys and values: which parts select ``KVFerryConnector``.

vLLM's plugin imports this module in every process, so it imports nothing of the connector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "KVFerryConnector"
MODULE = "kvferry.integrations.vllm"
MULTI = "MultiConnector"
"""vLLM's connector whose children are connectors themselves."""

EXTRA = "kv_connector_extra_config"

KEYS = (
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    EXTRA,
    "kv_load_failure_policy",
    "enable_permute_local_kv",
    "engine_id",
    "kv_buffer_device",
    "kv_port",
)
"""The keys of ``--kv-transfer-config`` in vLLM 0.32."""

OLD_KEYS = ("kv_buffer_size", "kv_ip", "kv_parallel_size", "kv_rank")
"""The keys that it has until vLLM 0.31."""


def own_transfers(transfer: object) -> list[Mapping[str, Any]]:
    """Return the parts that select ``KVFerryConnector``: the whole, or children."""
    whole = as_mapping(transfer)
    if _is_own(whole):
        return [whole]
    if whole.get("kv_connector") != MULTI:
        return []
    children = extra_of(whole).get("connectors")
    listed = children if isinstance(children, list | tuple) else ()
    return [child for child in listed if isinstance(child, Mapping) and _is_own(child)]


def as_mapping(transfer: object) -> Mapping[str, Any]:
    """Return what may be vLLM's ``KVTransferConfig`` or ``None`` as keys and values."""
    if isinstance(transfer, Mapping):
        return transfer
    return dict(vars(transfer)) if transfer is not None else {}


def extra_of(transfer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``kv_connector_extra_config``, empty if it is none."""
    extra = transfer.get(EXTRA)
    return extra if isinstance(extra, Mapping) else {}


def _is_own(transfer: Mapping[str, Any]) -> bool:
    module = transfer.get("kv_connector_module_path") or MODULE
    return transfer.get("kv_connector") == NAME and str(module).startswith(MODULE)
