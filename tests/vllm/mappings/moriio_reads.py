"""What vLLM's MoRIIOConnector reads: its own code, run without MoRI.

Its module imports ``msgpack``, which it uses for messages only; where that is not installed, an
empty module stands in for it. MoRI itself is optional for the import.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from tests.vllm.mappings.cases import HND, UNIT, Case, Reads, Refused

_LACKS_MSGPACK = find_spec("msgpack") is None
if _LACKS_MSGPACK:
    sys.modules["msgpack"] = ModuleType("msgpack")

from vllm.distributed.kv_transfer.kv_connector.v1.moriio import (  # noqa: E402
    moriio_connector as moriio,
)

if _LACKS_MSGPACK:
    del sys.modules["msgpack"]  # other code shall find that it is not installed

LAYER = "layer"


class Worker(moriio.MoRIIOConnectorWorker):
    """A worker of which only the mapping is used."""

    def __init__(self, case: Case, rank: int) -> None:
        self.world_size = case.decode.tp
        self.tp_rank = rank
        self.use_mla = case.mla
        self.dp_rank = 0
        heads = SimpleNamespace(get_total_num_kv_heads=lambda: case.heads)
        self.model_config: Any = heads
        self.layer_to_spec = {LAYER: _spec(case)}
        self.kv_caches = {LAYER: _cache(case)}
        self.kv_layer_mr_offset: dict[str, int] = {}
        self.moriio_config: Any = SimpleNamespace(backend="rdma")  # of vLLM 0.33

    def __del__(self) -> None:
        """Do nothing: there is no engine to close."""


def reads(case: Case, rank: int) -> Reads:
    near, far = case.decode, case.prefill
    if (near.block, near.order) != (far.block, far.order) or near.dcp * far.dcp > 1:
        raise Refused("the mapping pairs whole blocks by their position")
    worker = Worker(case, rank)
    meta: Any = SimpleNamespace(tp_size=far.tp, remote_dp_size=1)
    try:
        source, _ = worker._resolve_read_source(meta)
        if case.state:
            worker._mamba_tp_ratio(far.tp)
        releases = moriio.get_moriio_expected_ack_count(far.tp, near.tp)
        offsets = _offsets(case)
    except (NotImplementedError, ValueError) as e:
        raise Refused(str(e)) from e
    made = Reads(releases={source: releases})
    made.add(source, *offsets)
    return made


@lru_cache(maxsize=1)
def _offsets(case: Case) -> tuple[list[int], list[int], list[int]]:
    """Return the copies, which are the same for all ranks."""
    meta: Any = SimpleNamespace(num_blocks=case.pages)
    ids = case.page_ids(case.decode), case.page_ids(case.prefill)
    found: tuple[list[int], list[int], list[int]]
    found = Worker(case, 0)._compute_block_transfer_offsets(
        LAYER, *ids, meta, remote_tp_size=case.prefill.tp
    )
    return found


def _spec(case: Case) -> Any:
    shape = {"block_size": case.decode.block, "num_kv_heads": case.held(case.decode, 0)}
    if case.mla:
        return MLAAttentionSpec(**shape, head_size=UNIT, dtype=torch.int8)
    return FullAttentionSpec(**shape, head_size=UNIT // 2, dtype=torch.int8)


def _cache(case: Case) -> torch.Tensor:
    """Return a cache as vLLM passes it: indexed by block, head, token and byte."""
    held, block = case.held(case.decode, 0), case.decode.block
    if case.decode.order == HND:
        return torch.empty((case.pages, held, block, UNIT), dtype=torch.int8)
    return torch.empty((case.pages, block, held, UNIT), dtype=torch.int8).transpose(1, 2)
