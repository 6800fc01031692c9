"""A worker's position among the parallel ranks of its engine, and the engine's incarnation.

The incarnation is a random number that an engine draws anew each time it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.lifecycle.holds import Incarnation, random_incarnation
from kvferry.core.messages import Coordinates
from kvferry.integrations.vllm.caches.pages import ShardPosition

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The position of one worker among the parallel ranks of its engine.

    ``rank`` counts the ranks that publish a layout, in the order in which vLLM lists handshakes: by
    pipeline rank, then by tensor rank. Several prefill context-parallel ranks may each store all
    tokens: then all but the first are replicas, and publish none.
    """

    shard: ShardPosition
    coordinates: Coordinates
    rank: int
    replica: bool


def current_rank_position(vllm_config: VllmConfig) -> RankPosition:
    """Return this process's position, from vLLM's process groups."""
    from vllm.distributed import parallel_state as groups

    parallel = vllm_config.parallel_config
    tp, pp = groups.get_tp_group().rank_in_group, groups.get_pp_group().rank_in_group
    pcp_size = parallel.prefill_context_parallel_size
    dcp_size = parallel.decode_context_parallel_size
    pcp = groups.get_pcp_group().rank_in_group if pcp_size > 1 else 0
    dcp = groups.get_dcp_group().rank_in_group if dcp_size > 1 else 0
    tp_size = parallel.tensor_parallel_size
    # Prefill context ranks divide the tokens among themselves only if decode context parallelism is
    # on too. Otherwise each of them stores all tokens.
    token_ranks = pcp_size if dcp_size > 1 else 1
    return RankPosition(
        shard=ShardPosition(
            tp=tp,
            tp_size=tp_size,
            dcp=dcp,
            dcp_size=dcp_size,
            interleave=parallel.cp_kv_cache_interleave_size,
        ),
        coordinates=Coordinates(pp=pp, tp=tp, pcp=pcp, dcp=dcp),
        rank=(pp * token_ranks + pcp % token_ranks) * tp_size + tp,
        replica=token_ranks == 1 and pcp > 0,
    )


def shared_incarnation() -> Incarnation:
    """Return a random number of this start of the engine; all workers must call this together."""
    from vllm.distributed import parallel_state as groups

    incarnation = random_incarnation()
    for group in (groups.get_tp_group(), groups.get_pcp_group(), groups.get_pp_group()):
        if group.world_size > 1:
            incarnation = group.broadcast_object(incarnation, src=0)
    return incarnation
