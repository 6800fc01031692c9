"""Ray Serve LLM: prefill and decode as Ray deployments that scale over machines.

``build_pd_openai_app`` replaces ``ray.serve.llm:build_pd_openai_app`` as ``import_path`` of a Serve
application, with the same arguments. ``register`` is for applications that are built otherwise.

Importing this package does not import Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.core.errors import KVFerryError

if TYPE_CHECKING:
    from ray.serve.deployment import Application

CONNECTOR = "KVFerryConnector"

BACKEND = "kvferry.integrations.ray.backend:KVFerryBackend"
"""The backend, as Ray's registry takes it: every replica imports the class from there."""

__all__ = ["BACKEND", "build_pd_openai_app", "register"]


class ReplicaConfigError(KVFerryError, ValueError):
    """A deployment's configuration is refused; the message names the setting and the remedy."""


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Application:
    """Build Ray's prefill/decode application, with kvferry's backend registered.

    Raises ``KVFerryError`` as ``register``; ``ValueError`` if Ray refuses the arguments.
    """
    register()
    from ray.serve.llm import build_pd_openai_app as build

    return build(pd_serving_args)


def register() -> None:
    """Register kvferry's backend with Ray Serve LLM. Later calls have no effect.

    Call it in the process that deploys the application. Ray keeps the registration in the cluster,
    where every replica finds it.

    Raises:
        KVFerryError: Ray has no registry of backends where this version of kvferry looks for it.
    """
    try:
        from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import (
            KVConnectorBackendFactory,
        )

        registered = KVConnectorBackendFactory.is_registered(CONNECTOR)
    except (ImportError, AttributeError) as exc:
        raise KVFerryError(
            f"Ray has no KVConnectorBackendFactory where Ray 2.60 has it ({exc}): install "
            "'ray[serve,llm]==2.60.*', or a kvferry that knows your version of Ray"
        ) from exc
    if not registered:
        KVConnectorBackendFactory.register_backend(CONNECTOR, BACKEND)


def serve_on(kv_transfer_config: dict[str, Any], host: str) -> None:
    """Set the address of the side channel to the replica's node, unless an address is configured.

    Only the dictionary ``kv_connector_extra_config`` is changed in place: for a child of vLLM's
    ``MultiConnector``, Ray passes a copy of ``kv_transfer_config``, and only the dictionaries in
    that copy are those that the engine gets.

    Raises:
        ReplicaConfigError: ``engine_id`` is set.
    """
    if (engine := kv_transfer_config.get("engine_id")) is not None:
        raise ReplicaConfigError(
            f"kv_transfer_config sets engine_id to {engine!r}, which all replicas of the "
            "deployment would share: remove it, and vLLM gives every replica an engine_id of its "
            "own"
        )
    if kv_transfer_config.get("kv_connector_extra_config") is None:
        kv_transfer_config["kv_connector_extra_config"] = {}
    kv_transfer_config["kv_connector_extra_config"].setdefault("side_channel_host", host)
