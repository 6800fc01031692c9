"""What only vLLM 0.29 needs: this module goes when vLLM 0.29 is no longer supported.

From vLLM 0.30 on, workers report the ids of the requests whose load failed. vLLM 0.29 takes the ids
of their blocks instead, and only of models with one cache group. It also lacks some attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING

from kvferry.integrations.vllm.versions import first_layer, is_a, vllm_version

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput


def takes_failed_requests() -> bool:
    """Return whether this vLLM takes the ids of requests whose load failed."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def transfer_results(
    *, sent: set[str], received: set[str], failed: set[str]
) -> KVConnectorTransferResults:
    """Return a worker's results, as vLLM's class if it has one; ``failed`` are of ``received``."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    make = getattr(base, "KVConnectorTransferResults", SimpleNamespace)
    return make(finished_sending=sent, finished_recving=received, failed_recving=failed)


def unreportable_failures(config: KVCacheConfig) -> str | None:
    """Return why an engine cannot be told of a failed load, or ``None`` if it can be told.

    vLLM 0.29 recomputes a request from the first block that failed. The blocks before it must then
    have content, so the leading null blocks of sliding windows and states exclude these, too.
    """
    if takes_failed_requests():
        return None
    groups = [group.kv_cache_spec for group in config.kv_cache_groups]
    if len(groups) > 1:
        what = f"{len(groups)} cache groups"
    elif all(is_a(first_layer(group), "FullAttentionSpec") for group in groups):
        return None
    else:
        what = "a cache of sliding windows or states"
    return (
        f"vLLM {vllm_version()} and a model with {what}: it cannot be told that a load failed, and "
        "would decode from memory that was never written"
    )


class FailingLoads:
    """Which loads failed, and their blocks, for a vLLM that takes blocks of failed loads."""

    def __init__(self) -> None:
        self._needed = not takes_failed_requests()
        # By request, the blocks that its load fills.
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._failed: set[str] = set()

    def allocated(self, request_id: str, blocks: KVCacheBlocks, external: int) -> None:
        """Record the blocks that a load of ``external`` tokens will fill, if that is not 0."""
        if external and self._needed:
            (group,) = blocks.blocks
            self._blocks[request_id] = tuple(
                block.block_id for block in group if block.block_hash is None and not block.is_null
            )

    def blocks(self, output: KVConnectorOutput, reported: Iterable[str]) -> set[int]:
        """Return the blocks of loads that end with this output and failed on some rank.

        ``reported`` are the requests whose loads have failed on ranks in this step.
        """
        if not self._needed:
            return set()
        self._failed.update(reported)
        ended = output.finished_recving or ()
        filled = {each: self._blocks.pop(each, ()) for each in ended}
        return {block for each in self._failed.intersection(ended) for block in filled[each]}

    def failed(self, output: KVConnectorOutput) -> Collection[str]:
        """Return the requests whose load ends with this output and failed on some rank."""
        if not self._needed:
            return output.failed_recving or ()
        failed = self._failed.intersection(output.finished_recving or ())
        self._failed -= failed
        return failed


def uses_hisparse(vllm_config: VllmConfig) -> bool:
    """Return whether HiSparse is on."""
    return getattr(vllm_config.attention_config, "hisparse_config", None) is not None


def drafts_with_cache(speculative: SpeculativeConfig) -> bool:
    """Return whether speculative decoding has a KV cache of its own, as vLLM 0.30 says."""
    if hasattr(speculative, "uses_draft_kv_cache"):
        return bool(speculative.uses_draft_kv_cache())
    return bool(
        speculative.use_eagle()
        or speculative.uses_draft_model()
        or speculative.uses_extract_hidden_states()
    )
