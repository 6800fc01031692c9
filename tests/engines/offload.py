"""vLLM's offloading connector with memory that a CPU has: all of it is vLLM's but the copying.

vLLM loads this by name (``OFFLOADING`` is the child's configuration), as it would any other
offloading spec; its own copies with CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostSpec(CPUOffloadingSpec):
    """What is kept and where is vLLM's; the copies are `HostWorker`'s."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return HostWorker(kv_caches, self.num_chunks)


class HostWorker(OffloadingWorker):
    """Copies at once, and says so one step later, as something asynchronous would."""

    def __init__(self, caches: CanonicalKVCaches, chunks: int) -> None:
        self._caches = [each.tensor for each in caches.tensors]
        self._kept = [torch.empty_like(t[:1]).repeat(chunks, 1) for t in self._caches]
        self._copied: list[TransferResult] = []
        self._told: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        return self._copy(job_id, self._caches, src_spec, self._kept, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        return self._copy(job_id, self._kept, src_spec, self._caches, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        told, self._told, self._copied = self._told, self._copied, []
        return told

    def wait(self, job_ids: set[int]) -> None:
        """All has been copied."""

    def _copy(self, job: int, sources: list[Any], src: Any, targets: list[Any], dst: Any) -> bool:
        for source, target in zip(sources, targets, strict=True):
            target[torch.from_numpy(dst.block_ids)] = source[torch.from_numpy(src.block_ids)]
        self._copied.append(TransferResult(job_id=job, success=True))
        return True
