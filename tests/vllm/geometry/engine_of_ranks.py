"""Engines without a model: caches that vLLM lays out, worker halves over real endpoints.

vLLM's own functions turn the layers' specs into groups, block strides and tensors for every rank;
its formulas say where each rank stands. Nothing is computed: a test writes what an engine would.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity
from kvferry.core.layout import Layout
from kvferry.core.layout.host_page_format import HostPageFormat
from kvferry.core.lifecycle.holds import Incarnation, random_incarnation
from kvferry.drivers.loopback import LoopbackTransport
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.cache_groups import CacheGroup, cache_groups
from kvferry.integrations.vllm.caches.cache_layout import describe
from kvferry.integrations.vllm.caches.pages import ShardPosition
from kvferry.integrations.vllm.device import storage_of, work_marker
from kvferry.integrations.vllm.host_pool import HostPool
from kvferry.integrations.vllm.rank_position import RankPosition, current_rank_position
from tests.vllm.geometry.model import Layer, Part, Setting, Steps, stage

if TYPE_CHECKING:
    from kvferry.integrations.vllm.worker import FerryWorker, UnreadRankWorker

OPTIONS = EndpointOptions(handshake_timeout=60.0, lease=120.0, load_timeout=120.0)
POISON = 255
"""A byte that makes NaN of every element type."""
LONGEST = 1 << 12
"""The engines' ``max_model_len``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """All that two engines of one model may differ in."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    block: int = 16  # tokens of an attention block on one rank
    kernel: int = 0  # tokens of a kernel's block; 0 where kernels take the scheduler's
    order: str = "LBHNC"  # a name of VLLM_KV_CACHE_LAYOUT
    backend: str = "FLASH_ATTN"  # of attention
    state_block: int = LONGEST  # this and the next three are of states; see Setting
    mode: str = "none"
    scratch: int = 0
    channels_first: bool = False
    untransferred: tuple[str, ...] = ()  # layers whose group is not transferred
    shares: tuple[tuple[str, str], ...] = ()  # layers that use another's cache, and whose
    blocks: int = 96
    host_pages: int = 0  # of a rank, the hole included; 0 where nothing is staged
    caches: bool = True  # prefixes, if its states allow it
    unit: int | None = None  # tokens that are hashed together; None where vLLM decides

    def setting(self, position: ShardPosition) -> Setting:
        """For a rank's specs."""
        return Setting(
            position=position,
            block=self.block,
            state_block=self.state_block,
            mode=self.mode,
            scratch=self.scratch,
            channels_first=self.channels_first,
            backend=self.backend,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The caches of a vLLM group on one rank: its tensors, and which tokens they are of."""

    parts: tuple[Part, ...]
    size: int = 1  # of context parallelism
    turn: int = 0  # this rank's
    interleave: int = 1

    def steps(self, part: Part, positions: Steps) -> Steps:
        """(positions, entries): which entries of a request pages at these positions hold."""
        entries = part.places.shape[1]
        local = np.add.outer(positions * entries, np.arange(entries)) * part.per_entry
        rounds, within = np.divmod(local, self.interleave)
        token = (rounds * self.size + self.turn) * self.interleave + within
        found: Steps = token // part.per_entry
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One worker process's caches, and its half of the connector."""

    position: RankPosition
    memory: Any  # every byte of its caches
    extents: tuple[Extent, ...]  # by vLLM's groups
    worker: FerryWorker | UnreadRankWorker
    endpoint: Endpoint | None  # None where another rank publishes the same caches

    @property
    def holds(self) -> bool:
        """Whether its slot table has a word of a hold."""
        if self.endpoint is None:
            return False
        slots = self.endpoint.payload.slots
        return any(ctypes.string_at(slots.address, slots.nbytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    name: str
    shape: Shape
    config: Any  # what its scheduler is told about the caches
    groups: tuple[CacheGroup, ...]  # those that are transferred
    ranks: tuple[Rank, ...]


@contextlib.contextmanager
def engine(name: str, layers: Sequence[Layer], shape: Shape) -> Iterator[Engine]:
    """An engine that runs until the block ends, its caches full of poison."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    positions = list(_seats(shape))
    configs = _configs(layers, shape, positions)
    scheduler = generate_scheduler_kv_cache_config(configs)
    incarnation = random_incarnation()
    with contextlib.ExitStack() as stack:
        yield Engine(
            name=name,
            shape=shape,
            config=scheduler,
            groups=cache_groups(scheduler, shape.dcp),
            ranks=tuple(
                _rank(name, layers, shape, position, config, incarnation, stack)
                for position, config in zip(positions, configs, strict=True)
            ),
        )


def layouts(layers: Sequence[Layer], shape: Shape) -> list[Layout]:
    """What the ranks of an engine would publish."""
    positions = list(_seats(shape))
    configs = _configs(layers, shape, positions)
    return [
        _described(_allocate(config, shape), config, layers, shape.setting(position.shard))
        for position, config in zip(positions, configs, strict=True)
    ]


def runs(layers: Sequence[Layer], shape: Shape) -> bool:
    """Whether vLLM itself lays the caches of such an engine out, and soundly.

    With heads outside of blocks, groups of unlike heads overlay each other so that a page of one
    has bytes of pages of the other that have other ids.
    """
    try:
        configs = _configs(layers, shape, list(_seats(shape)))
        for config in configs:
            _allocate(config, shape)
    except (AssertionError, NotImplementedError, StopIteration, ValueError):
        # The third where a pipeline rank has no layer of a packed group.
        return False
    return shape.order != "LHBNC" or len(configs[0].kv_cache_groups) == 1


def _seats(shape: Shape) -> Iterator[RankPosition]:
    """Every process's, in vLLM's order of ranks; its groups as in ``initialize_model_parallel``."""
    from vllm.distributed import parallel_state

    world = np.arange(shape.pp * shape.pcp * shape.tp).reshape(shape.pp, shape.pcp, shape.tp)
    contexts = world.transpose(0, 2, 1).reshape(-1, shape.dcp)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=shape.tp,
            prefill_context_parallel_size=shape.pcp,
            decode_context_parallel_size=shape.dcp,
            cp_kv_cache_interleave_size=shape.interleave,
        )
    )
    for rank, (pp, pcp, tp) in enumerate(np.ndindex(world.shape)):
        ranks = {"tp": tp, "pp": pp, "pcp": pcp, "dcp": int(np.argwhere(contexts == rank)[0][1])}
        with contextlib.ExitStack() as stack:
            for kind, where in ranks.items():
                group = SimpleNamespace(rank_in_group=where)
                name = f"get_{kind}_group"
                stack.enter_context(mock.patch.object(parallel_state, name, return_value=group))
            yield current_rank_position(config)


def _configs(layers: Sequence[Layer], shape: Shape, positions: Sequence[RankPosition]) -> list[Any]:
    """What vLLM's engine core makes of the specs of all ranks."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    owners = [layer for layer in layers if layer.name not in dict(shape.shares)]
    specs = [
        {
            layer.name: layer.spec(shape.setting(position.shard))
            for layer in stage(owners, position.coordinates.pp, shape.pp)
        }
        for position in positions
    ]
    configs: list[Any] = get_kv_cache_configs(_vllm_config(shape), specs, [1 << 40] * len(specs))
    for config in configs:
        for group in config.kv_cache_groups:
            group.enable_kv_transfer = not set(group.layer_names) & set(shape.untransferred)
            for user, owner in shape.shares:
                if owner in group.layer_names:
                    group.layer_names.append(user)
    return configs


def _vllm_config(shape: Shape) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return SimpleNamespace(
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=64,
        speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(max_model_len=64, original_max_model_len=64),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=shape.tp, decode_context_parallel_size=shape.dcp
        ),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout[shape.order],
            num_gpu_blocks_override=shape.blocks,
            prefix_cache_retention_interval=None,
            mamba_cache_mode=shape.mode,
        ),
    )


def _rank(
    name: str,
    layers: Sequence[Layer],
    shape: Shape,
    position: RankPosition,
    config: Any,
    incarnation: Incarnation,
    stack: contextlib.ExitStack,
) -> Rank:
    import torch

    from kvferry.integrations.vllm.worker import FerryWorker, UnreadRankWorker

    caches = _allocate(config, shape)
    setting = shape.setting(position.shard)
    memory = storage_of(next(iter(caches.values()))).numpy()
    memory[:] = POISON
    worker: FerryWorker | UnreadRankWorker = UnreadRankWorker()
    endpoint = None
    layout = _described(caches, config, layers, setting)
    staged = _stage(caches, layout, shape) if shape.host_pages else None
    if not position.replica:
        identity = Identity(
            engine=name,
            incarnation=incarnation,
            rank=position.rank,
            coordinates=position.coordinates,
            agreement={"model": "model"},
        )
        endpoint = stack.enter_context(
            Endpoint(
                identity=identity,
                driver="loopback",
                transport=LoopbackTransport(),
                layout=layout if staged is None else staged.layout,
                slots=shape.blocks,
                options=OPTIONS,
                copies=staged,
            )
        )
        worker = FerryWorker(endpoint, work_marker(torch.device("cpu")), staged=staged)
    return Rank(
        position=position,
        memory=memory,
        extents=tuple(_extents(config, caches, {a.name: a for a in layers}, setting)),
        worker=worker,
        endpoint=endpoint,
    )


def _described(
    caches: Mapping[str, Any], config: Any, layers: Sequence[Layer], setting: Setting
) -> Layout:
    facts = {layer.name: layer.facts(setting) for layer in layers}
    return describe(caches, config, facts=facts, position=setting.position)


def _stage(caches: Mapping[str, Any], cache: Layout, shape: Shape) -> HostPool:
    """A pool of host pages, full of poison."""
    import torch

    form, pages = HostPageFormat.of(cache), shape.host_pages
    pool = HostPool(caches.values(), form, pages, device=torch.device("cpu"))
    for region in pool.layout.regions:
        ctypes.memset(region.address, POISON, region.nbytes)
    return pool


def _allocate(config: Any, shape: Shape) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        KVCacheLayout,
        MambaSpec,
        iter_layer_specs,
    )
    from vllm.v1.worker.utils import allocate_kv_cache

    own = [next(iter(iter_layer_specs(group.kv_cache_spec))) for group in config.kv_cache_groups]
    kernels = [
        shape.kernel
        if shape.kernel and not isinstance(spec, MambaSpec | CircularBufferSpec)
        else spec.block_size
        for spec in own
    ]
    order = KVCacheLayout[shape.order]
    caches: dict[str, Any] = allocate_kv_cache(config, torch.device("cpu"), order, kernels)
    return caches | {user: caches[owner] for user, owner in shape.shares if owner in caches}


def _extents(
    config: Any, caches: Mapping[str, Any], layers: Mapping[str, Layer], setting: Setting
) -> Iterator[Extent]:
    for group in config.kv_cache_groups:
        own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        parts: dict[int, tuple[Part, ...]] = {}
        for name in group.layer_names:
            spec = own.get(name, group.kv_cache_spec)
            found = layers[name].parts(caches[name], spec, setting, config.num_blocks)
            parts.setdefault(caches[name].data_ptr(), tuple(found))
        flat = tuple(part for some in parts.values() for part in some)
        if versions.is_context_sharded(group.kv_cache_spec):
            position = setting.position
            yield Extent(
                parts=flat,
                size=position.dcp_size,
                turn=position.dcp,
                interleave=position.interleave,
            )
        else:
            yield Extent(parts=flat)
