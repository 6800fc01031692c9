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
from dataclasses import dataclass
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
    """What a spec depends on beside its layer.

    Attributes:
        position: which rank it is for.
        block: tokens of an attention block on one rank.
        state_block: after how many tokens a state goes on in the next page.
        mode: of the prefix cache of states, ``none`` or ``align``.
        scratch: pages of a state for tokens that are speculated.
        channels_first: the convolutions' layout is DS, not SD.
        backend: of attention layers that do not insist on one.
    """

    position: ShardPosition
    block: int
    state_block: int
    mode: str
    scratch: int
    channels_first: bool
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a layer, as far as it is in one rank's cache.

    Attributes:
        key: names the tensor in the model.
        places: (pages, entries, shards, bytes): each byte's offset in the rank's buffer.
        shards: which of the model's shards these are.
        per_entry: tokens that an entry stands for; 0 in a state, which has one entry, and in a
            ring.
        ring: how many tokens are compressed together, in a ring; 0 in all others.
    """

    key: str
    places: views.Places
    shards: range
    per_entry: int = 1
    ring: int = 0

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
        """What entries hold, (steps, shards, bytes): the reference function. Never 0, never 255.

        Args:
            steps: numbers of entries from the request's start, or of tokens behind a state.
            request: whose they are.
        """
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
    """A layer that has a cache.

    Attributes:
        name: vLLM's.
        draft: it is of a speculative model.
    """

    name: str
    draft: bool = False

    @abstractmethod
    def spec(self, setting: Setting) -> Any:
        """vLLM's ``KVCacheSpec`` on a rank."""

    @abstractmethod
    def facts(self, setting: Setting) -> LayerFacts:
        """What is known of it beside its spec."""

    @abstractmethod
    def parts(self, cache: Any, spec: Any, setting: Setting, pages: int) -> Iterator[Part]:
        """Where its tensors lie in the cache of a rank, whose spec vLLM may have changed."""


@dataclass(frozen=True, kw_only=True)
class Attention(Layer):
    """Keys and values.

    Attributes:
        heads: of KV, on all ranks.
        size, size_v: elements of a key, and of a value if that is another number.
        dtype: of torch.
        window: how many tokens are attended to; 0 for all.
        chunk: tokens are attended to within chunks of so many; 0 if they are not.
        generated: how many of the generated tokens are attended to; 0 for all.
        backend: which kernels; the engine's choice if empty.
    """

    heads: int = 4
    size: int = 16
    size_v: int = 0
    dtype: str = "bfloat16"
    window: int = 0
    chunk: int = 0
    generated: int = 0
    backend: str = ""

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
        if self._backend(setting) in SLOTS:
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
        return LayerFacts(backend=self._backend(setting), heads=self.heads, draft=self.draft)

    def parts(self, cache: Any, spec: Any, setting: Setting, pages: int) -> Iterator[Part]:
        reading = READINGS[self._backend(setting)]
        for key, places in views.read(cache, spec, pages, reading).items():
            yield Part(
                key=f"{self.name}/{key}",
                places=places,
                shards=self._here(setting.position) if reading is not whole else range(1),
                per_entry=spec.block_size // places.shape[1],
            )

    def _backend(self, setting: Setting) -> str:
        return self.backend or setting.backend

    def _here(self, position: ShardPosition) -> range:
        """As ``get_num_kv_heads`` and the weight loaders of ``QKVParallelLinear`` have it."""
        if position.tp_size >= self.heads:
            head = position.tp // (position.tp_size // self.heads)
            return range(head, head + 1)
        here = self.heads // position.tp_size
        return range(position.tp * here, (position.tp + 1) * here)


@dataclass(frozen=True, kw_only=True)
class Latent(Layer):
    """One latent per entry, on every rank.

    Attributes:
        size: its elements.
        per_entry: tokens that one latent stands for.
        window: how many tokens are attended to; 0 for all.
        replay: after a prefix hit, vLLM computes the window again (bounded replay).
    """

    size: int = 24
    per_entry: int = 1
    backend: str = "TRITON_MLA"
    window: int = 0
    replay: bool = False

    def spec(self, setting: Setting) -> Any:
        import torch
        from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

        if self.window:
            return SlidingWindowMLASpec(
                block_size=setting.block,
                num_kv_heads=1,
                head_size=self.size,
                dtype=torch.bfloat16,
                sliding_window=self.window,
                bounded_replay=self.replay,
                max_tp_shards=1,
            )
        return MLAAttentionSpec(
            block_size=setting.block,
            num_kv_heads=1,
            head_size=self.size,
            dtype=torch.bfloat16,
            tokens_per_state=self.per_entry,
            max_tp_shards=1,
        )

    def facts(self, setting: Setting) -> LayerFacts:
        return LayerFacts(backend=self.backend, heads=1, draft=self.draft)

    def parts(self, cache: Any, spec: Any, setting: Setting, pages: int) -> Iterator[Part]:
        [(key, places)] = views.read(cache, spec, pages, READINGS[self.backend]).items()
        yield Part(
            key=f"{self.name}/{key}",
            places=places,
            shards=range(1),
            per_entry=spec.block_size // places.shape[1],
        )


@dataclass(frozen=True, kw_only=True)
class Ring(Layer):
    """The last tokens of a request, raw, until they are compressed; the same on every rank.

    Attributes:
        ratio: tokens that are compressed together.
        capacity: of the ring, in tokens.
        size: elements of a token in one head slot.
        slots: head slots, such as one for keys and one for scores.
    """

    ratio: int = 4
    capacity: int = 8
    size: int = 6
    slots: int = 1
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

    def facts(self, setting: Setting) -> LayerFacts:
        return LayerFacts(backend=self.backend, heads=1, draft=self.draft)

    def parts(self, cache: Any, spec: Any, setting: Setting, pages: int) -> Iterator[Part]:
        """``circular_qsa_slot_mapping``: token t of a request is in slot t % capacity."""
        [places] = views.read(cache, spec, pages, views.ring).values()
        yield Part(
            key=f"{self.name}/ring",
            places=places,
            shards=range(self.slots),
            per_entry=0,
            ring=self.ratio,
        )


@dataclass(frozen=True, kw_only=True)
class Recurrent(Layer):
    """A state: as in Mamba 2, a convolution over x, B and C and a recurrence for each head.

    Attributes:
        heads, head, size: of the recurrence: heads on all ranks, and each head's matrix.
        groups: of B and C on all ranks; a multiple of the ranks, or one that each of them has.
        kernel: width of the convolution.
        delta: a gated delta net instead, whose groups are its key heads.
    """

    heads: int = 12
    head: int = 4
    size: int = 6
    groups: int = 1
    kernel: int = 4
    delta: bool = False

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


def stage(layers: Sequence[Layer], pp: int, size: int) -> list[Layer]:
    """The layers of a pipeline rank: runs of nearly equal length."""
    return list(layers[pp * len(layers) // size : (pp + 1) * len(layers) // size])
