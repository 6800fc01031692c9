"""What vLLM's MooncakeConnector moves: its own code, run without Mooncake.

Prefill writes there: what is called "local" in its code is the prefill rank. Mooncake is optional
for the import, so no stand-in is needed.
"""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as mooncake
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tests.vllm.mappings.cases import HND, UNIT, Case, Reads, Refused, Side

LAYER = "layer.0"
REQUEST, TRANSFER = "request", "transfer"


class Worker(mooncake.MooncakeConnectorWorker):
    """A prefill worker of which only the mapping is used."""

    def __init__(self, case: Case, rank: int) -> None:
        size = case.page_bytes(case.prefill)
        shape = {"block_size": case.prefill.block, "num_kv_heads": case.held(case.prefill, rank)}
        kind, width = (MLAAttentionSpec, UNIT) if case.mla else (FullAttentionSpec, UNIT // 2)
        spec = kind(**shape, head_size=width, dtype=torch.int8)
        self.tp_rank, self.tp_size = rank, case.prefill.tp
        self.pp_rank, self.pp_size = 0, 1
        self.use_mla = case.mla
        self._physical_blocks_per_logical_kv_block = 1
        self._prepared_transfer_regions: dict[Any, Any] = {}
        self._layer_specs = {LAYER: spec}
        self.kv_caches_base_addr = [0]
        self.block_len_per_layer = [size]
        self.kv_block_len_per_layer = [size]
        self.registered_layer_names = [LAYER]
        self.registered_layer_indices = [0]
        self.registered_group_indices = [0]
        self.region_shared_groups = [(0,)]
        self.region_row_offsets = [-1]
        self.kv_cache_config: Any = SimpleNamespace(
            has_mamba_layers=False, transfer_groups=[SimpleNamespace(kv_cache_spec=spec)]
        )
        self.transfer_topo = topology(case, case.prefill, rank)

    def __del__(self) -> None:
        """Do nothing: there is no engine to close."""


def topology(case: Case, side: Side, rank: int) -> TransferTopology:
    """Return what a rank knows of its own engine."""
    return TransferTopology(
        tp_rank=rank,
        tp_size=side.tp,
        block_size=side.block,
        engine_id=str(side is case.decode),
        is_mla=case.mla,
        is_mamba=False,
        total_num_kv_heads=case.heads,
        attn_backends=[],
    )


def reads(case: Case, rank: int) -> Reads:
    """Return what a decode rank is sent."""
    near, far = case.decode, case.prefill
    if case.state:
        raise Refused("states are not described here")
    if near.block != far.block or near.dcp * far.dcp > 1:
        raise Refused("the mapping pairs blocks by their position")
    if {near.order, far.order} != {HND}:
        raise Refused("pages are by head")
    made = Reads()
    try:
        asked = topology(case, near, rank).handshake_target_ranks(far.tp)
    except AssertionError as e:
        raise Refused(str(e)) from e
    for source in asked:
        copies, releases = _sent(Worker(case, source), case, rank)
        if copies[0]:
            made.add(source, *copies)
            made.releases[source] = releases
    return made


def _sent(
    worker: Worker, case: Case, rank: int
) -> tuple[tuple[list[int], list[int], list[int]], int]:
    """Return what a prefill rank sends to a decode rank, in the order of ``send_kv_to_decode``."""
    receivers = worker.transfer_topo.handshake_target_ranks(case.decode.tp)
    assert rank in receivers
    meta = _metadata(case, rank)
    near, far, problem = worker._prepare_transfer_regions(meta)
    problem = problem or mooncake._validate_asymmetric_region_lengths(
        near,
        far,
        worker.tp_size,
        case.decode.tp,
        worker._producer_cache_is_replicated(),
        None if case.mla else case.heads,
    )
    if problem is not None:
        raise Refused(problem)
    request: Any = SimpleNamespace(local_block_ids=[case.page_ids(case.prefill)])
    found = _result(worker._build_transfer_params([(REQUEST, request)], meta, near, far))
    sources, targets, nbytes, failed, _ = found
    assert not failed
    return (targets, sources, nbytes), len(receivers)


def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for something")


def _metadata(case: Case, rank: int) -> mooncake.MooncakeXferMetadata:
    size = case.page_bytes(case.decode)
    return mooncake.MooncakeXferMetadata(
        remote_hostname="decode",
        remote_port=1,
        remote_tp_size=case.decode.tp,
        remote_tp_rank=rank,
        req_blocks={REQUEST: (TRANSFER, [case.page_ids(case.decode)])},
        kv_caches_base_addr=[0],
        block_lens=[size],
        kv_block_lens=[size],
        registered_layer_names=[LAYER],
        registered_layer_indices=[0],
        registered_group_indices=[0],
        registered_shared_group_ids=[[0]],
        registered_row_offsets=[-1],
    )
