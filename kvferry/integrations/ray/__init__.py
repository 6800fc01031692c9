"""Ray Serve LLM: prefill and decode as Ray deployments that scale over machines.

``build_pd_openai_app`` replaces ``ray.serve.llm:build_pd_openai_app`` as ``import_path`` of a Serve
application, with the same arguments. ``register`` is for applications that are built otherwise.

Importing this package does not import Ray.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvferry.core.errors import KVFerryError

if TYPE_CHECKING:
    from ray.serve.deployment import Application

CONNECTOR = "KVFerryConnector"
"""The name of the connector: ``kv_connector``."""

BACKEND = "kvferry.integrations.ray.backend:KVFerryBackend"
"""The backend, as Ray's registry takes it: every replica imports the class from there."""

__all__ = ["BACKEND", "build_pd_openai_app", "register"]


class ReplicaConfigError(KVFerryError, ValueError):
    """A deployment's configuration is refused; the message names the setting and the remedy."""


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Application:
    """Build Ray's prefill/decode application, with kvferry's backend registered.

    Args:
        pd_serving_args: The arguments of ``ray.serve.llm.build_pd_openai_app``:
            ``prefill_config``, ``decode_config`` and options of the ingress.

    Raises:
        KVFerryError: Ray has no registry of backends where this version of kvferry looks for it.
        ValueError: A configuration sets ``engine_id``, or Ray refuses the arguments.
    """
    for name in ("prefill_config", "decode_config"):
        # A dictionary or Ray's ``LLMConfig``; the backend checks those that are a file's name.
        config = pd_serving_args.get(name)
        if isinstance(config, dict):
            engine = config.get("engine_kwargs")
        else:
            engine = getattr(config, "engine_kwargs", None)
        if isinstance(engine, dict):
            check_engine_id(engine.get("kv_transfer_config"))
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
        try:
            installed = version("ray")
        except PackageNotFoundError:
            installed = "(not installed)"
        raise KVFerryError(
            f"Ray {installed} has no KVConnectorBackendFactory where Ray 2.60 has it ({exc}): "
            "install 'ray[serve,llm]==2.60.*', or a kvferry that knows your version of Ray"
        ) from exc
    if not registered:
        KVConnectorBackendFactory.register_backend(CONNECTOR, BACKEND)


def check_engine_id(kv_transfer_config: object) -> None:
    """Refuse, by ``ReplicaConfigError``, an ``engine_id``: all replicas would share it."""
    if isinstance(kv_transfer_config, dict) and kv_transfer_config.get("engine_id") is not None:
        raise ReplicaConfigError(
            f"kv_transfer_config sets engine_id to {kv_transfer_config['engine_id']!r}, which all "
            "replicas of the deployment would share: remove it, and vLLM gives every replica an "
            "engine_id of its own"
        )


def serve_on(kv_transfer_config: dict[str, Any], host: str) -> None:
    """Set the address of the side channel to the replica's node, unless an address is configured.

    Only the dictionary ``kv_connector_extra_config`` is changed in place: for a child of vLLM's
    ``MultiConnector``, Ray passes a copy of ``kv_transfer_config``, and only the dictionaries in
    that copy are those that the engine gets.

    Raises:
        ReplicaConfigError: ``engine_id`` is set.
    """
    check_engine_id(kv_transfer_config)
    if kv_transfer_config.get("kv_connector_extra_config") is None:
        kv_transfer_config["kv_connector_extra_config"] = {}
    kv_transfer_config["kv_connector_extra_config"].setdefault("side_channel_host", host)
