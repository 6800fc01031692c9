"""Ray Serve LLM: prefill and decode as Ray deployments that scale over machines.

``build_pd_openai_app`` replaces ``ray.serve.llm:build_pd_openai_app`` as ``import_path`` of a Serve
application, with the same arguments. ``register`` is for applications that are built otherwise.

Importing this package does not import Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.core.errors import KVFerryError
from kvferry.integrations.ray.replica_config import CONNECTOR, check_engine_id, ray_version

if TYPE_CHECKING:
    from ray.serve.deployment import Application

BACKEND = "kvferry.integrations.ray.backend:KVFerryBackend"
"""The backend, as Ray's registry takes it: every replica imports the class from there."""

__all__ = ["BACKEND", "build_pd_openai_app", "register"]


def build_pd_openai_app(pd_serving_args: dict[str, Any]) -> Application:
    """Build Ray's prefill/decode application, with kvferry's backend registered.

    Args:
        pd_serving_args: The arguments of ``ray.serve.llm.build_pd_openai_app``:
            ``prefill_config``, ``decode_config`` and options of the ingress.

    Returns:
        The Serve application.

    Raises:
        KVFerryError: Ray has no registry of backends where this version of kvferry looks for it.
        ValueError: A configuration sets ``engine_id``, or Ray refuses the arguments.
    """
    for name in ("prefill_config", "decode_config"):
        _check(pd_serving_args.get(name))
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
            f"Ray {ray_version()} has no KVConnectorBackendFactory where Ray 2.60 has it ({exc}): "
            "install 'ray[serve,llm]==2.60.*', or a kvferry that knows your version of Ray"
        ) from exc
    if not registered:
        KVConnectorBackendFactory.register_backend(CONNECTOR, BACKEND)


def _check(llm_config: object) -> None:
    """Refuse a configuration whose replicas would share an ``engine_id``, before any starts.

    Args:
        llm_config: A dictionary or Ray's ``LLMConfig``. Ray itself checks everything else, and the
            backend checks configurations that are the name of a file.
    """
    if isinstance(llm_config, dict):
        engine = llm_config.get("engine_kwargs")
    else:
        engine = getattr(llm_config, "engine_kwargs", None)
    if isinstance(engine, dict):
        check_engine_id(engine.get("kv_transfer_config"))
