"""What only vLLM 0.29 needs: this module goes when vLLM 0.29 is no longer supported.

From vLLM 0.30 on, workers report the ids of the requests whose load failed. vLLM 0.29 takes the ids
of their blocks instead, and only of models with one cache group. It also lacks some attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
    """Loads, in the scheduler half, for a vLLM that takes the blocks of failed ones; else none."""

    def __init__(self) -> None:
        self._needed = not takes_failed_requests()
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._reported: set[str] = set()

    def allocated(self, request_id: str, blocks: KVCacheBlocks, external: int) -> None:
        """Record the blocks that a load of ``external`` tokens will fill, if that is not 0."""
        if external and self._needed:
            (group,) = blocks.blocks
            self._blocks[request_id] = tuple(
                block.block_id for block in group if block.block_hash is None and not block.is_null
            )

    def take(self) -> Mapping[str, tuple[int, ...]]:
        """Return the blocks of each request recorded since the last call, for the workers."""
        blocks, self._blocks = self._blocks, {}
        return blocks

    def failed(self, output: KVConnectorOutput, reported: Iterable[str]) -> Collection[str]:
        """Return the requests whose load ended on all workers in this step, and failed on one.

        Ranks have ``reported`` those that failed on them, since vLLM does not say it.
        """
        if hasattr(output, "failed_recving"):
            return output.failed_recving or ()
        self._reported.update(reported)
        failed = self._reported.intersection(output.finished_recving or ())
        self._reported -= failed
        return failed


class FailedBlocks:
    """The blocks of failed loads, in a worker half; where vLLM takes requests, none."""

    def __init__(self) -> None:
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()

    def started(self, blocks: Mapping[str, tuple[int, ...]]) -> None:
        """Record the blocks of loads that start (``FailingLoads.take``)."""
        self._blocks.update(blocks)

    def ended(self, received: Iterable[str], failed: Collection[str]) -> None:
        """Record which requests' loads ended, and which of these failed."""
        for request_id in received:
            blocks = self._blocks.pop(request_id, None)
            if blocks is not None and request_id in failed:
                self._failed.add(request_id)
                self._failed_blocks.update(blocks)

    def take_blocks(self) -> set[int]:
        """Return the blocks of loads that failed since the last call."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_requests(self) -> frozenset[str]:
        """Return the requests whose load failed since the last call."""
        failed, self._failed = self._failed, set()
        return frozenset(failed)


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
