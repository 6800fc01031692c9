"""The plugin that registers the connector with vLLM (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING

from kvferry.integrations.vllm import dynamo
from kvferry.integrations.vllm.transfer_config import MODULE, NAME, own_transfers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_CHECKED = "_kvferry_checks"  # marks vLLM's method to which the checks were added


def register() -> None:
    """Register ``KVFerryConnector`` with vLLM and Dynamo, and have launches checked.

    vLLM calls this in each process, also repeatedly.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    dynamo.register(NAME)
    _check_launches(getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None))


def _check_launches(engine_args: type[EngineArgs] | None) -> None:
    """Add the checks of a launch to the method with which vLLM makes an engine's configuration.

    vLLM builds a connector only after it has loaded the model. It loads plugins when it makes an
    ``EngineArgs``, in the process that launches the engine; then it calls ``create_engine_config``.
    """
    original = getattr(engine_args, "create_engine_config", None)
    if engine_args is None or original is None or hasattr(original, _CHECKED):
        return

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: object, **kwargs: object) -> VllmConfig:
        vllm_config = original(self, *args, **kwargs)
        if own_transfers(vllm_config.kv_transfer_config):
            from kvferry.integrations.vllm.checks import check_launch

            check_launch(vllm_config)
        return vllm_config

    setattr(create_engine_config, _CHECKED, True)
    engine_args.create_engine_config = create_engine_config
