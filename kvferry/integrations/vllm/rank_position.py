"""Where a worker stands in its engine, and what all of the engine's workers agree on at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.lifecycle.holds import Incarnation, random_incarnation
from kvferry.core.messages import Coordinates
from kvferry.integrations.vllm.caches.pages import TensorPlace
from kvferry.integrations.vllm.ticket_params import ParallelSizes

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """One worker's.

    Attributes:
        place: its part of what the ranks share out.
        coordinates: for others to see.
        rank: its index among the ranks that publish a layout; ascending with vLLM's order of
            their handshakes: by pipeline rank, then by tensor rank.
        replica: the rank holds nothing that another one does not publish already: it is one of
            several prefill context ranks that all store all tokens.
    """

    place: TensorPlace
    coordinates: Coordinates
    rank: int
    replica: bool


def seat_of(vllm_config: VllmConfig) -> RankPosition:
    """Where this process stands, by vLLM's groups of processes."""
    from vllm.distributed import parallel_state as groups

    parallel = vllm_config.parallel_config
    tp, pp = groups.get_tp_group().rank_in_group, groups.get_pp_group().rank_in_group
    pcp_size, dcp_size = (
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
    pcp = groups.get_pcp_group().rank_in_group if pcp_size > 1 else 0
    dcp = groups.get_dcp_group().rank_in_group if dcp_size > 1 else 0
    tp_size = parallel.tensor_parallel_size
    # Only together do the two deal tokens out among the prefill context ranks.
    dealt = pcp_size if dcp_size > 1 else 1
    return RankPosition(
        place=TensorPlace(
            tp=tp,
            tp_size=tp_size,
            dcp=dcp,
            dcp_size=dcp_size,
            interleave=parallel.cp_kv_cache_interleave_size,
        ),
        coordinates=Coordinates(pp=pp, tp=tp, pcp=pcp, dcp=dcp),
        rank=(pp * dealt + pcp % dealt) * tp_size + tp,
        replica=dealt == 1 and pcp > 0,
    )


def shared_incarnation() -> Incarnation:
    """One random number for all ranks of this start: what the first of them drew.

    Every worker of the engine must call it, once and at the same point of its start.
    """
    from vllm.distributed import parallel_state as groups

    incarnation = random_incarnation()
    if not groups.model_parallel_is_initialized():
        return incarnation
    for group in (groups.get_tp_group(), groups.get_pcp_group(), groups.get_pp_group()):
        if group.world_size > 1:
            incarnation = group.broadcast_object(incarnation, src=0)
    return incarnation


def sizes_of(parallel: ParallelConfig) -> ParallelSizes:
    """What a ticket says of an engine's parallelism."""
    return ParallelSizes(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        dcp=parallel.decode_context_parallel_size,
    )
