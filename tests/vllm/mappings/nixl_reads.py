"""What vLLM's NixlConnector reads: its own code, run without NIXL.

The worker is made without its constructor, which would start an agent; attributes that the called
methods use are set by hand. Nothing of NIXL is called, so no stand-in is needed.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import (
    TPMapping,
    compute_tp_mapping,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

from tests.vllm.mappings.cases import HND, UNIT, Bytes, Case, Reads, Refused

HERE, THERE, LAYER = "decode", "prefill", "layer"


class Worker(NixlPullConnectorWorker):
    """A worker of which only the mapping is used."""

    def __init__(self, case: Case, rank: int) -> None:
        decode, prefill = case.decode, case.prefill
        attention = MLAAttentionSpec if case.mla else FullAttentionSpec
        self._group_spec_types = (attention, MambaSpec) if case.state else (attention,)
        self._has_mamba = case.state
        self.use_mla = case.mla
        self.dcp_size = decode.dcp
        self.dcp_rank = rank % decode.dcp
        self.block_size = decode.block
        self.kv_cache_layout = decode.order
        self.block_len_per_layer = [case.page_bytes(decode)]
        self.block_stride_per_layer = [case.page_bytes(decode)]
        self.region_num_blocks = [case.pages]
        self.num_regions = 1
        self._region_is_mla = [case.mla]
        self._head_sharded_draft_regions: set[int] = set()  # of vLLM 0.33
        self._transfer_layer_region_indices = ()
        self._transfer_layer_group_ids = ()
        self._transfer_layer_names = ()
        self._ple_region_index = None
        self._logical_num_blocks = case.pages
        self._physical_blocks_per_logical_kv_block = 1
        self.region_names = [LAYER]
        self._layer_specs: dict[str, Any] = {}
        self.region_group_ids: list[int] = []
        self.dst_num_blocks = {THERE: case.pages}
        self.dst_region_group_ids = {THERE: [0]}
        self.use_host_buffer = False
        self.enable_permute_local_kv = False
        self.enable_heterogeneous_attn_post_process = False
        self._is_hma_required = False
        self.backend_name = "FLASH_ATTN"
        self.device_id = 0
        layers = [SimpleNamespace(layer_names=[LAYER])]
        self.kv_cache_config: Any = SimpleNamespace(transfer_groups=layers)
        self.kv_transfer_config: Any = SimpleNamespace(enable_permute_local_kv=False)
        caching = SimpleNamespace(enable_prefix_caching=True)
        self.vllm_config: Any = SimpleNamespace(cache_config=caching)
        self.transfer_topo = TransferTopology(
            tp_rank=rank,
            tp_size=decode.tp,
            block_size=decode.block,
            engine_id=HERE,
            is_mla=case.mla,
            is_mamba=case.state,
            total_num_kv_heads=case.heads,
            attn_backends=[],
            dcp_size=decode.dcp,
        )
        info = EngineTransferInfo(
            remote_tp_size=prefill.tp,
            remote_block_len=case.page_bytes(prefill),
            remote_block_size=prefill.block,
            remote_physical_blocks_per_logical=1,
            remote_dcp_size=prefill.dcp,
        )
        self.transfer_topo.register_remote_engine(THERE, info)

    def __del__(self) -> None:
        """Do nothing: there is no agent to close."""


def reads(case: Case, rank: int) -> Reads:
    worker, metadata = Worker(case, rank), _metadata(case)
    prefill = case.prefill
    try:
        # In the order of ``add_remote_agent``.
        mapping = compute_tp_mapping(
            worker.transfer_topo, prefill.tp, worker._group_spec_types, prefill.dcp
        )
        ratio = worker.transfer_topo.block_size_ratio(prefill.block)
        worker._validate_remote_agent_handshake(metadata, prefill.tp, prefill.dcp)
        local = _local_descriptors(worker, mapping, ratio)
    except (AssertionError, RuntimeError, NotImplementedError, ValueError) as e:
        raise Refused(str(e)) from e
    remote = _blocks(worker._build_fa_remote(mapping, metadata, ratio))
    made = Reads()
    for source, rows in local.items():
        ids = _pages(worker, case, source, ratio)
        near, far = rows[ids[0]], remote[ids[1]]
        assert (near[:, 1] == far[:, 1]).all()
        made.add(source, near[:, 0], far[:, 0], near[:, 1])
    made.releases = dict.fromkeys(mapping.all_source_ranks, mapping.local_consumers)
    if case.state:
        made.state_ranks = set(mapping.source_ranks_per_group[1])
    if ratio > 1 and not case.mla:
        assert case.decode.order == HND
        made.rearrange = partial(_rearranged, worker, case, ratio)
    return made


def _rearranged(worker: Worker, case: Case, ratio: int, received: Bytes) -> Bytes:
    """Return decode's cache after the permutation on the device that follows such a transfer."""
    cache = torch.from_numpy(received.copy())
    shape = case.pages, case.held(case.decode, 0), case.decode.block, UNIT
    worker.device_kv_caches = {LAYER: cache.view(shape)}
    local = case.page_ids(case.decode)
    covered = len(case.page_ids(case.prefill))
    worker.post_process_device_kv_on_receive(ratio, [(0, local, covered)])
    rearranged: Bytes = cache.numpy()
    return rearranged


def _metadata(case: Case) -> NixlAgentMetadata:
    size = case.page_bytes(case.prefill)
    return NixlAgentMetadata(
        engine_id=THERE,
        agent_metadata=b"",
        kv_caches_base_addr=[0],
        device_id=0,
        num_blocks=case.pages,
        block_lens=[size],
        block_strides=[size],
        kv_cache_layout=case.prefill.order,
        block_size=case.prefill.block,
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
        dcp_size=case.prefill.dcp,
    )


def _local_descriptors(worker: Worker, mapping: TPMapping, ratio: int) -> dict[int, np.ndarray]:
    """Return, for each prefill rank that attention is read from, a row for each local block."""
    rows = worker._build_fa_local([0], ratio)
    count = len(_blocks(rows))
    tp_ratio = worker.transfer_topo.tp_ratio(
        worker.transfer_topo.get_engine_info(THERE).remote_tp_size
    )
    by_rank = dict.fromkeys(mapping.all_source_ranks, rows)
    if worker._needs_split_local_xfer_handles(tp_ratio, mapping):
        split = worker._build_local_splits_from_plan(mapping, rows, count, ratio)
        arrays = (np.array(each, dtype=np.uint64) for each in split)
        by_rank = dict(zip(mapping.all_source_ranks, arrays, strict=True))
    return {rank: _blocks(by_rank[rank]) for rank in mapping.source_ranks_per_group[0]}


def _blocks(rows: np.ndarray) -> np.ndarray:
    """Return descriptors with a row (address, length, device) for each block.

    vLLM 0.33 has rows that stand for several blocks: a stride and a count are added.
    """
    if rows.shape[1] == 3:
        return rows
    first, size, device, stride, count = rows.astype(np.int64).T
    index = np.concatenate([np.arange(n) for n in count])
    first, size, device, stride = (np.repeat(c, count) for c in (first, size, device, stride))
    return np.stack([first + stride * index, size, device], axis=1)


def _pages(worker: Worker, case: Case, source: int, ratio: int) -> tuple[list[int], list[int]]:
    """Return which local and which remote blocks are paired, as indices of descriptors."""
    local, remote = case.page_ids(case.decode), case.page_ids(case.prefill)
    if case.decode.dcp > 1 or case.prefill.dcp > 1:
        sizes = case.decode.dcp, worker.dcp_rank, case.prefill.dcp
        local, remote = worker._apply_dcp_prefix_caching(local, remote, source, *sizes, 0)
    if ratio > 1:
        [local], [remote] = worker._map_block_ids_for_block_size_ratio([local], [remote], ratio)
    return local, remote
