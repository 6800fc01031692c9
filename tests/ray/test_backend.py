"""The backend in Ray's own classes, without a cluster and without engines."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from kvferry.integrations.ray import CONNECTOR, register

pytestmark = pytest.mark.filterwarnings("ignore")

TICKET = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill",
    "remote_block_ids": [[3, 1, 2]],
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "kvferry": {"v": 1, "hold": "AAECAw==", "proof": "c2lnbmVk"},
}


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> str:
    """This node's address, as Ray tells it."""
    import ray

    register()
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    return "10.0.0.7"


def transfer(**settings: Any) -> dict[str, Any]:
    """Return a ``kv_transfer_config``."""
    extra = {"kv_connector_extra_config": {"driver": "loopback"}}
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", **extra, **settings}


def set_up(kv_transfer_config: dict[str, Any]) -> Any:
    """Return Ray's configuration of a replica after it has set up the connector's backend."""
    from ray.serve.llm import LLMConfig

    config = LLMConfig(
        model_loading_config={"model_id": "tiny"},
        accelerator_config={"kind": "cpu"},
        engine_kwargs={"kv_transfer_config": kv_transfer_config},
    )
    config.setup_engine_backend()
    return config


def extra_of(config: Any) -> dict[str, Any]:
    """Return the connector's settings that vLLM gets from Ray."""
    engine = config.get_engine_config().get_initialization_kwargs()
    extra: dict[str, Any] = engine["kv_transfer_config"]["kv_connector_extra_config"]
    return extra


def test_ray_finds_the_backend_by_the_connectors_name() -> None:
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

    from kvferry.integrations.ray.backend import KVFerryBackend

    assert KVConnectorBackendFactory.get_backend_class(CONNECTOR) is KVFerryBackend


def test_vllm_gets_the_nodes_address(node: str) -> None:
    assert extra_of(set_up(transfer())) == {"driver": "loopback", "side_channel_host": node}


def test_vllm_gets_the_nodes_address_below_a_multi_connector(node: str) -> None:
    """Ray sets up a copy of the configuration for each child."""
    children = {"connectors": [transfer(), {"kv_connector": "OffloadingConnector"}]}
    config = set_up(
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": children,
        }
    )
    child = extra_of(config)["connectors"][0]
    assert child["kv_connector_extra_config"]["side_channel_host"] == node


def test_replicas_have_engine_ids_of_their_own() -> None:
    from vllm.config import KVTransferConfig

    made = [KVTransferConfig(**transfer()).engine_id for _ in range(2)]
    assert None not in made
    assert made[0] != made[1]


def test_a_configuration_with_the_backend_can_be_sent_to_other_processes() -> None:
    """On GPUs, Ray makes vLLM's configuration in a task."""
    config = pickle.loads(pickle.dumps(set_up(transfer())))
    assert config.kv_connector_backend is not None


def test_prefill_is_asked_for_one_token_and_a_ticket() -> None:
    backend = set_up(transfer()).kv_connector_backend
    asked = backend.prepare_prefill_request(request=completion(stream=True), peer=None)
    assert (asked.max_tokens, asked.stream) == (1, False)
    assert asked.kv_transfer_params["do_remote_decode"] is True


def test_prefill_is_not_asked_for_the_clients_minimum_of_tokens() -> None:
    """vLLM refuses a minimum above the maximum, which is one token on prefill."""
    backend = set_up(transfer()).kv_connector_backend
    request = completion(min_tokens=5)
    asked = backend.prepare_prefill_request(request=request, peer=None)
    assert (asked.min_tokens, request.min_tokens) == (0, 5)


def test_the_ticket_in_prefills_answer_goes_to_decode_as_it_is() -> None:
    from ray.serve.llm.openai_api_models import CompletionResponse

    backend = set_up(transfer()).kv_connector_backend
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    answer = CompletionResponse(
        model="tiny", choices=[], usage=usage, kv_transfer_params=copy.deepcopy(TICKET)
    )
    request = completion(stream=True)
    sent = backend.prepare_decode_request(request=request, peer=None, prefill_response=answer)
    assert sent.kv_transfer_params == TICKET
    assert (sent.max_tokens, sent.stream) == (12, True)


def completion(**fields: Any) -> Any:
    """Return a client's request, as Ray's ingress has parsed it."""
    from ray.serve.llm.openai_api_models import CompletionRequest

    return CompletionRequest(model="tiny", prompt=[1, 2, 3], max_tokens=12, **fields)
