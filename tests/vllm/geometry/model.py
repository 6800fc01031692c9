"""Layers of a model, as every engine has them whatever its shape, and what their caches hold.

A layer says what vLLM's spec of it is on one rank, and where in that rank's cache each element of
the model lies: by the backends' own expressions (``views``), never by a layout.
"""

from __future__ import annotations

import functools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from kvferry.integrations.vllm.caches.pages import LayerFacts, ShardPosition
from tests.vllm.caches import views

Bytes = npt.NDArray[np.uint8]
Steps = npt.NDArray[np.int64]


def whole(cache: Any, spec: Any) -> dict[str, Any]:
    """A page of kernels that nobody has read: all that is known is which bytes are its."""
    return {"page": cache.reshape(cache.shape[0], 1, 1, -1)}


READINGS: dict[str, views.Reading] = {
    "FLASH_ATTN": views.split_cells,
    "FLASHINFER": views.split_cells,
    "TRITON_ATTN": views.split_cells,
    "FLASH_ATTN_DIFFKV": views.split_cells,
    "B12X": views.unbound,
    "ROCM_ATTN": views.paged_attention,
    "CPU_ATTN/vec": views.columns,
    "OF_TOMORROW": whole,
    "TRITON_MLA": views.one_row,
    "FLASHMLA": views.one_row,
    "CPU_MLA": views.one_row,
    "CPU_V4_INDEXER": whole,
}
"""How the backends that are tried here read their pages."""

SLOTS = {"B12X", "ROCM_ATTN"}
"""The backends whose pages have one head slot for K and one for V, and all heads in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a spec depends on beside its layer."""

    position: ShardPosition
    block: int
    state_block: int  # after how many tokens a state goes on in the next page
    mode: str  # of the prefix cache of states, "none" or "align"
    scratch: int  # pages of a state for tokens that are speculated
    channels_first: bool  # the convolutions' layout is DS, not SD
    backend: str  # of attention layers that do not insist on one


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a layer, as far as it is in one rank's cache."""

    key: str
    places: views.Places  # (pages, entries, shards, bytes): each byte's offset in the buffer
    shards: range  # which of the model's
    per_entry: int = 1  # tokens that an entry stands for; 0 in a state (one entry) and in a ring
    ring: int = 0  # how many tokens are compressed together, in a ring

    def held(self, tokens: int) -> Steps:
        """What the entries of the page of a state or ring are of, after so many tokens.

        A state's is of all of them. A ring's slots are of the last tokens; where there are fewer
        tokens than slots, of tokens with negative numbers, which nobody reads.
        """
        if not self.ring:
            return np.array([tokens])
        capacity = self.places.shape[1]
        last = tokens - 1
        held: Steps = last - (last - np.arange(capacity)) % capacity
        return held

    def values(self, steps: Steps, request: str) -> Bytes:
        """What entries (tokens, for a state) hold, (steps, shards, bytes). Never 0, never 255."""
        seed, size = zlib.crc32(f"{request} {self.key}".encode()), self.places.shape[3]
        if steps.size and steps.min() >= 0 and steps.max() < FIRST:
            return first_values(seed, self.shards, size)[steps]
        return mixed_values(seed, steps, self.shards, size)


FIRST = 1024
"""How many entries' values are computed at once: the same ones are looked at again and again."""


@functools.lru_cache(512)
def first_values(seed: int, shards: range, size: int) -> Bytes:
    """``mixed_values`` of the first entries."""
    return mixed_values(seed, np.arange(FIRST), shards, size)


def mixed_values(seed: int, steps: Steps, shards: range, size: int) -> Bytes:
    """Bytes that depend on every argument, (steps, shards, size)."""
    mixed = np.full((1, 1, 1), seed, dtype=np.uint64)
    shard, element = np.arange(shards.start, shards.stop), np.arange(size)
    for axis in (steps[:, None, None], shard[None, :, None], element[None, None, :]):
        mixed = (mixed + axis.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed ^ (mixed >> np.uint64(29))
    return (mixed % np.uint64(254) + np.uint64(1)).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class Layer(ABC):
    """A layer that has a cache: one latent per entry, on every rank, unless a subclass differs."""

    name: str
    draft: bool = False  # of a speculative model
    backend: str = ""  # which kernels; the engine's choice if empty

    @abstractmethod
    def spec(self, setting: Setting) -> Any:
        """vLLM's ``KVCacheSpec`` on a rank."""

    def facts(self, setting: Setting) -> LayerFacts:
        """What is known of it beside its spec."""
        return LayerFacts(backend=self._kernels(setting), heads=1, draft=self.draft)

    def parts(self, cache: Any, spec: Any, setting: Setting, pages: int) -> Iterator[Part]:
        """Where its tensors lie in the cache of a rank, whose spec vLLM may have changed."""
        reading = READINGS[self._kernels(setting)]
        for key, places in views.read(cache, spec, pages, reading).items():
            yield Part(
                key=f"{self.name}/{key}",
                places=places,
                shards=range(1) if reading is whole else self._here(setting.position),
                per_entry=spec.block_size // places.shape[1],
            )

    def _kernels(self, setting: Setting) -> str:
        return self.backend or setting.backend

    def _here(self, position: ShardPosition) -> range:
        """Which of the model's shards a rank has."""
        return range(1)


@dataclass(frozen=True, kw_only=True)
class Attention(Layer):
    """Keys and values."""

    heads: int = 4  # of KV, on all ranks
    size: int = 16  # of a key
    size_v: int = 0  # of a value, if that is another number
    dtype: str = "bfloat16"
    window: int = 0  # how many tokens are attended to; 0 for all
    chunk: int = 0  # tokens are attended to within chunks of so many; 0 if they are not
    generated: int = 0  # how many of the generated tokens are attended to; 0 for all

    def spec(self, setting: Setting) -> Any:
        import torch
        from vllm.v1 import kv_cache_interface as specs

        here = len(self._here(setting.position))
        common: dict[str, Any] = {
            "block_size": setting.block,
            "num_kv_heads": here,
            "head_size": self.size,
            "head_size_v": self.size_v or self.size,
            "dtype": getattr(torch, self.dtype),
        }
        if self._kernels(setting) in SLOTS:
            row = here * self.size * common["dtype"].itemsize
            common |= {"num_head_slots": 2, "state_content_bytes": row}
        if self.window:
            return specs.SlidingWindowSpec(**common, sliding_window=self.window)
        if self.chunk:
            return specs.ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.chunk)
        if self.generated:
            return specs.RSWASpec(**common, rswa_window=self.generated)
        return specs.FullAttentionSpec(**common)

    def facts(self, setting: Setting) -> LayerFacts:
        return replace(super().facts(setting), heads=self.heads)

    def _here(self, position: ShardPosition) -> range:
        """As ``get_num_kv_heads`` and the weight loaders of ``QKVParallelLinear`` have it."""
        if position.tp_size >= self.heads:
            head = position.tp // (position.tp_size // self.heads)
            return range(head, head + 1)
        return _even(self.heads, position)


@dataclass(frozen=True, kw_only=True)
class Latent(Layer):
    """One latent per entry, on every rank."""

    size: int = 24
    per_entry: int = 1  # tokens that one latent stands for
    backend: str = "TRITON_MLA"
    dtype: str = "bfloat16"
    window: int = 0  # how many tokens are attended to; 0 for all
    replay: bool = False  # after a prefix hit, vLLM computes the window again (bounded replay)

    def spec(self, setting: Setting) -> Any:
        import torch
        from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

        common: dict[str, Any] = {
            "block_size": setting.block,
            "num_kv_heads": 1,
            "head_size": self.size,
            "dtype": getattr(torch, self.dtype),
        }
        if hasattr(MLAAttentionSpec, "max_tp_shards"):  # from vLLM 0.31 on
            common["max_tp_shards"] = 1
        if self.window:
            return SlidingWindowMLASpec(
                **common, sliding_window=self.window, bounded_replay=self.replay
            )
        return MLAAttentionSpec(**common, tokens_per_state=self.per_entry)


@dataclass(frozen=True, kw_only=True)
class Ring(Layer):
    """The last tokens of a request, raw, until they are compressed; the same on every rank."""

    ratio: int = 4  # tokens that are compressed together
    capacity: int = 8  # in tokens
    size: int = 6  # of a token in one head slot
    slots: int = 1  # head slots, such as one for keys and one for scores
    backend: str = "CompressorBackend"

    def spec(self, setting: Setting) -> Any:
        import torch
        from vllm.v1.kv_cache_interface import CircularBufferSpec

        return CircularBufferSpec(
            block_size=self.capacity,
            num_kv_heads=self.slots,
            head_size=self.size,
            head_size_v=0,
            dtype=torch.float32,
            dcp_sharded=False,
        )

    def parts(self, cache: Any, spec: Any, setting: Setting, pages: int) -> Iterator[Part]:
        """``circular_qsa_slot_mapping``: token t of a request is in slot t % capacity."""
        [places] = views.read(cache, spec, pages, views.ring).values()
        shards = range(self.slots)
        yield Part(
            key=f"{self.name}/ring", places=places, shards=shards, per_entry=0, ring=self.ratio
        )


@dataclass(frozen=True, kw_only=True)
class Recurrent(Layer):
    """A state: as in Mamba 2, a convolution over x, B and C and a recurrence for each head."""

    heads: int = 12  # on all ranks
    head: int = 4  # of each head's matrix, as is the next
    size: int = 6
    groups: int = 1  # of B and C on all ranks; a multiple of the ranks, or one that each has
    kernel: int = 4  # width of the convolution
    delta: bool = False  # a gated delta net instead, whose groups are its key heads

    def spec(self, setting: Setting) -> Any:
        import torch
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds
        from vllm.v1.kv_cache_interface import MambaSpec

        return MambaSpec(
            block_size=setting.state_block,
            shapes=self._shapes(setting),
            dtypes=(torch.bfloat16, torch.float32),
            mamba_type=Kinds.GDN_ATTN if self.delta else Kinds.MAMBA2,
            mamba_cache_mode=setting.mode,
            num_speculative_blocks=setting.scratch,
        )

    def _shapes(self, setting: Setting) -> Any:
        from vllm.model_executor.layers.mamba import mamba_utils

        tp = setting.position.tp_size
        shape = mamba_utils.MambaStateShapeCalculator
        first = setting.channels_first
        with mock.patch.object(mamba_utils, "is_conv_state_dim_first", return_value=first):
            if self.delta:
                return shape.gated_delta_net_state_shape(
                    tp,
                    num_k_heads=self.groups,
                    num_v_heads=self.heads,
                    head_k_dim=self.size,
                    head_v_dim=self.head,
                    conv_kernel_size=self.kernel,
                    num_spec=setting.scratch,
                )
            return shape.mamba2_state_shape(
                tp,
                intermediate_size=self.heads * self.head,
                n_groups=self.groups,
                num_heads=self.heads,
                head_dim=self.head,
                state_size=self.size,
                conv_kernel=self.kernel,
                num_spec=setting.scratch,
            )

    def facts(self, setting: Setting) -> LayerFacts:
        return LayerFacts(
            backend="GDN_ATTN" if self.delta else "MAMBA2_ATTN",
            draft=self.draft,
            groups=self.groups,
            kernel=self.kernel,
            channels_first=setting.channels_first,
        )

    def parts(self, cache: Any, spec: Any, setting: Setting, pages: int) -> Iterator[Part]:
        conv, ssm = self._tensors(cache, spec, pages)
        if not setting.channels_first:
            conv = conv.swapaxes(1, 2)
        conv = conv[:, :, : self.kernel - 1].reshape(*conv.shape[:2], -1)
        start = 0
        for name, shards in self._channels(setting.position):
            yield self._part(f"conv {name}", conv[:, start : start + len(shards)], shards)
            start += len(shards)
        heads = _even(self.heads, setting.position)
        yield self._part("ssm", ssm.reshape(*ssm.shape[:2], -1), heads)

    def _part(self, name: str, places: views.Places, shards: range) -> Part:
        return Part(key=f"{self.name}/{name}", places=places[:, None], shards=shards, per_entry=0)

    def _tensors(self, cache: Any, spec: Any, pages: int) -> Iterator[views.Places]:
        """(page, *shape, bytes of an element), as ``MambaBase.bind_kv_cache`` splits a page."""
        start = np.arange(pages) * cache.stride(0) + cache.storage_offset()
        offset = 0
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            count = math.prod(shape) * dtype.itemsize
            within = np.arange(offset, offset + count).reshape(*shape, dtype.itemsize)
            yield np.add.outer(start, within)
            offset += count

    def _channels(self, position: ShardPosition) -> Iterator[tuple[str, range]]:
        """The convolution's channels on a rank, as the weight loaders of vLLM's mixers deal them
        out (B and C of one group go to every rank)."""
        inner, shared = self.heads * self.head, self.groups * self.size
        some = range(shared) if self.groups == 1 and not self.delta else _even(shared, position)
        if self.delta:
            yield from (("q", some), ("k", some), ("v", _even(inner, position)))
        else:
            yield from (("x", _even(inner, position)), ("B", some), ("C", some))


def _even(total: int, position: ShardPosition) -> range:
    here = total // position.tp_size
    return range(position.tp * here, (position.tp + 1) * here)


def attention(count: int, **options: Any) -> list[Layer]:
    """So many layers of keys and values, numbered."""
    return [Attention(name=f"model.layers.{i}.self_attn.attn", **options) for i in range(count)]


def latents(count: int, **options: Any) -> list[Layer]:
    """So many layers of latents, numbered."""
    return [Latent(name=f"model.layers.{i}.self_attn.mla", **options) for i in range(count)]


def windows(*sizes: int) -> list[Layer]:
    """A layer for each window, 0 for full attention."""
    return [
        Attention(name=f"model.layers.{i}.attn", size=8, window=size)
        for i, size in enumerate(sizes)
    ]


def hybrid(window: int = 40) -> list[Layer]:
    """Windows beside full attention."""
    return windows(0, window, window, 0, window, window)


def recurrent(*, window: int = 0, **options: Any) -> list[Layer]:
    """States beside attention, which sees a window only on one of the layers."""
    layers: list[Layer] = [Recurrent(name=f"model.layers.{i}.mixer", **options) for i in range(6)]
    for i, seen in ((2, window), (5, 0)):
        layers[i] = Attention(name=f"model.layers.{i}.attn", heads=12, size=8, window=seen)
    return layers


def compressed(*, window: int = 24, indexer: str = "TRITON_MLA") -> list[Layer]:
    """As DeepSeek V4.1: windows, compressed entries with an indexer's, and rings in front.

    These models have backends that only offer orders in which blocks are outermost. In the other
    orders, vLLM makes all pages of one size, and a ring's capacity with them.
    """
    layers: list[Layer] = []
    for name in ("model.layers.0.attn", "model.layers.1.attn"):
        layers += [
            Latent(name=f"{name}.swa_cache", window=window, replay=True),
            Latent(name=f"{name}.mla_attn", per_entry=4),
            Latent(name=f"{name}.indexer.k_cache", per_entry=4, size=12, backend=indexer),
            Ring(name=f"{name}.compressor.state_cache"),
        ]
    return layers


def stage(layers: Sequence[Layer], pp: int, size: int) -> list[Layer]:
    """The layers of a pipeline rank."""
    from vllm.distributed.utils import get_pp_indices

    return list(layers[slice(*get_pp_indices(len(layers), pp, size))])
