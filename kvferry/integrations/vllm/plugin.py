"""The plugin that registers the connector with vLLM (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

from kvferry.core.errors import KVFerryError
from kvferry.integrations.vllm import dynamo

NAME = "KVFerryConnector"
MODULE = "kvferry.integrations.vllm"


def register() -> None:
    """Register ``KVFerryConnector`` with vLLM, and with Dynamo where Dynamo is installed.

    vLLM calls this in each of its processes, in some more than once; later calls have no effect.

    Raises:
        KVFerryError: Another connector is registered under this name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError as exc:
        registered = KVConnectorFactory.get_connector_class_by_name(NAME)
        if not registered.__module__.startswith(MODULE):
            raise KVFerryError(
                f"vLLM has a connector {NAME!r} already, from {registered.__module__}: uninstall "
                f"its package, or set kv_connector_module_path to {MODULE!r}"
            ) from exc
    dynamo.register(NAME)
