"""``KVFerryBackend``: what Ray Serve LLM calls in every replica whose connector is kvferry's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import ray
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import DefaultConnectorBackend

from kvferry.integrations.ray import serve_on

if TYPE_CHECKING:
    from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

    Request: TypeAlias = ChatCompletionRequest | CompletionRequest


class KVFerryBackend(DefaultConnectorBackend):
    """Prepare a replica's connector, and shape requests by Ray's default protocol.

    With that protocol, prefill runs first, and the ticket in its answer goes to decode as it is.
    """

    def setup(self) -> None:
        """Set the side channel's address to this node's, or raise ``ReplicaConfigError``."""
        serve_on(self.kv_transfer_config, ray.util.get_node_ip_address())

    def prepare_prefill_request(self, *, request: Request, peer: dict[str, Any] | None) -> Request:
        """Return the request for prefill: one token and a ticket, which says where the pages are.

        Ray 2.60 leaves ``min_tokens`` as the client set it, which vLLM refuses beside one token.
        """
        asked: Request = super().prepare_prefill_request(request=request, peer=peer)
        asked.min_tokens = 0
        return asked
