"""The settings in ``kv_transfer_config`` that each replica of a deployment needs for itself."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvferry.core.errors import KVFerryError

CONNECTOR = "KVFerryConnector"
"""The name of the connector: ``kv_connector``."""


class ReplicaConfigError(KVFerryError, ValueError):
    """A deployment's configuration is refused; the message names the setting and the remedy."""


def check_engine_id(kv_transfer_config: object) -> None:
    """Refuse a configured ``engine_id``, which all replicas of the deployment would share.

    Args:
        kv_transfer_config: vLLM's settings of the connector; anything but a dictionary passes.

    Raises:
        ReplicaConfigError: ``engine_id`` is set.
    """
    if isinstance(kv_transfer_config, dict) and kv_transfer_config.get("engine_id") is not None:
        raise ReplicaConfigError(
            f"kv_transfer_config sets engine_id to {kv_transfer_config['engine_id']!r}, which all "
            "replicas of the deployment would share: remove it, and vLLM gives every replica an "
            "engine_id of its own"
        )


def serve_on(kv_transfer_config: dict[str, Any], host: str) -> None:
    """Set the address of the side channel to the replica's node, unless an address is configured.

    The dictionary ``kv_connector_extra_config`` is changed in place. For a child of vLLM's
    ``MultiConnector``, Ray passes a copy of ``kv_transfer_config``, and only the dictionaries in
    that copy are those that the engine gets.

    Args:
        kv_transfer_config: vLLM's settings of the connector.
        host: The node's address.

    Raises:
        ReplicaConfigError: ``engine_id`` is set.
    """
    check_engine_id(kv_transfer_config)
    if kv_transfer_config.get("kv_connector_extra_config") is None:
        kv_transfer_config["kv_connector_extra_config"] = {}
    kv_transfer_config["kv_connector_extra_config"].setdefault("side_channel_host", host)


def ray_version() -> str:
    """Return the version of Ray that is installed, or ``"(not installed)"``."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return "(not installed)"
