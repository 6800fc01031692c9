"""Import vLLM's own tests of the second turn, and let them test this connector."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGE = "vllm_kv_connector_tests"
FOLDER = Path("tests/v1/kv_connector/unit")
MODULE = "test_bidirectional_kv_transfer"


def load(source: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of tests, imported from vLLM's source distribution.

    The module imports fake workers from the tests of NixlConnector, which need Ray. A stand-in
    replaces these tests.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    package, fakes = ModuleType(PACKAGE), ModuleType(f"{PACKAGE}.test_nixl_connector")
    package.__path__ = [str(source / FOLDER)]
    vars(fakes).update(
        FakeNixlConnectorWorker=type("FakeNixlConnectorWorker", (), {"REMOTE_ENGINE_ID": ""}),
        FakeNixlWrapper=object,
    )
    for each in (package, fakes):
        patch.setitem(sys.modules, each.__name__, each)
    patch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    return importlib.import_module(f"{PACKAGE}.{MODULE}")


def replace_helpers(
    module: ModuleType,
    patch: pytest.MonkeyPatch,
    *,
    configuration: Callable[..., Any],
    scheduler: Callable[[Any], Any],
    first_ticket: Callable[[list[int]], dict[str, Any]],
    conversation_ticket: Callable[[list[int]], dict[str, Any]],
) -> None:
    """Replace the helpers with which the tests make engines and requests.

    The prompts stay the same: request *n* has the first multiples of *n*.
    """
    bare_request = module.create_request

    def create_request(*, do_remote_prefill: bool = False, **arguments: Any) -> Any:
        made = bare_request(**arguments)
        if do_remote_prefill:
            made.kv_transfer_params = first_ticket(list(made.prompt_token_ids))
        return made

    def second_turn(
        request_id: int,
        block_size: int,
        num_tokens: int,
        num_remote_blocks: int = 3,
        remote_num_tokens: int | None = None,
    ) -> Any:
        made = bare_request(request_id=request_id, block_size=block_size, num_tokens=num_tokens)
        made.max_tokens = made.sampling_params.max_tokens = 1
        covered = remote_num_tokens or num_remote_blocks * block_size
        made.kv_transfer_params = conversation_ticket([i * request_id for i in range(covered)])
        assert made.kv_transfer_params["do_remote_decode"] is True
        assert made.kv_transfer_params["remote_num_tokens"] == covered
        [blocks] = made.kv_transfer_params["remote_block_ids"]
        assert len(blocks) == num_remote_blocks
        return made

    def create_vllm_config(*, kv_connector_extra_config: dict[str, Any]) -> Any:
        return configuration(**kv_connector_extra_config)

    patch.setattr(module, "create_vllm_config", create_vllm_config)
    patch.setattr(module, "create_scheduler", scheduler)
    patch.setattr(module, "create_request", create_request)
    patch.setattr(module, "_make_p_node_turn2_request", second_turn)
