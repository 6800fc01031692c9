"""The layout that is made of vLLM's cache tensors says where vLLM's kernels put each byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import LayoutError
from kvferry.core.layout import GroupKind, axis
from kvferry.integrations.vllm.caches import describe, local_heads
from tests.integrations.vllm import probes
from tests.integrations.vllm.engines import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("block", "head"), [(32, 64), (64, 64), (32, 80), (96, 128), (48, 32)])
def test_kernels_agree_with_the_layout(
    reference: Engine, dtype: str, block: int, head: int
) -> None:
    """vLLM's own kernel writes known keys and values; they are read back through the layout."""
    assert reference.run(probes.cache_written_by_kernel, dtype, block, head) == []


def _config(*groups: list[str]) -> Any:
    return SimpleNamespace(transfer_groups=[SimpleNamespace(layer_names=names) for names in groups])


def _caches(names: list[str], shape: tuple[int, ...] = (9, 2, 32, 64)) -> dict[str, Any]:
    """Layers one after the other in one buffer, as vLLM makes them."""
    torch = pytest.importorskip("torch")
    buffer = torch.zeros((len(names), *shape), dtype=torch.float32)
    return dict(zip(names, buffer, strict=True))


def test_layers_of_one_buffer() -> None:
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    layout = describe(
        _caches(names), _config(names), backends=dict.fromkeys(names, "CPU_ATTN/vec"), heads=(2, 4)
    )
    assert len(layout.regions) == 1
    [group] = layout.groups
    assert (group.kind, group.block_tokens) == (GroupKind.PAGED, 32)
    key, value, *_ = layout.fields
    assert [f.key for f in layout.fields] == [f"{name}/{part}" for name in names for part in "kv"]
    assert (key.pages, key.page_stride, key.shard_range) == (9, 16384, (2, 4))
    assert (key.unit, key.tokens, key.inner) == (4, axis((32, 4)), (axis((32, 128)),))
    assert (value.offset, value.unit, value.tokens) == (4096, 128, axis((32, 128)))
    assert layout.fields[2].offset == 9 * 16384


def test_blocks_of_all_layers() -> None:
    """A block-outermost cache: a page is followed by the next layer's page."""
    torch = pytest.importorskip("torch")
    names = ["a", "b"]
    buffer = torch.zeros((9, 2, 2, 32, 64), dtype=torch.float32)
    caches = {name: buffer[:, i] for i, name in enumerate(names)}
    layout = describe(
        caches, _config(names), backends=dict.fromkeys(names, "CPU_ATTN/vec"), heads=(0, 2)
    )
    assert {f.page_stride for f in layout.fields} == {32768}
    assert [f.offset for f in layout.fields] == [0, 4096, 16384, 20480]


def test_unknown_backend_is_opaque() -> None:
    names = ["a"]
    layout = describe(_caches(names), _config(names), backends={"a": "CPU_ATTN/amx"}, heads=(0, 2))
    assert layout.groups[0].kind is GroupKind.OPAQUE
    [page] = layout.fields
    assert (page.key, page.unit, page.digits) == ("a/page", 16384, ())
    assert page.packing == "CPU_ATTN/amx float32 2x32x64"


def test_shared_cache_is_described_once() -> None:
    names = ["a", "b"]
    caches = _caches(["a"])
    layout = describe(
        caches | {"b": caches["a"]},
        _config(names),
        backends=dict.fromkeys(names, "CPU_ATTN/vec"),
        heads=(0, 2),
    )
    assert [f.key for f in layout.fields] == ["a/k", "a/v"]


@pytest.mark.parametrize(
    ("shape", "heads", "reason"),
    [
        ((9, 2, 32, 64), (0, 4), "4 heads"),
        ((9, 2, 32, 63), (0, 2), "two equal halves|of one size"),
        ((9, 2, 2048), (0, 2), "is not"),
    ],
)
def test_other_shape_is_refused(
    shape: tuple[int, ...], heads: tuple[int, int], reason: str
) -> None:
    with pytest.raises(LayoutError, match=reason):
        describe(_caches(["a"], shape), _config(["a"]), backends={"a": "CPU_ATTN/vec"}, heads=heads)


def test_tokens_outside_heads_are_refused_where_the_kernel_has_none() -> None:
    """A CPU kernel reads head-major pages only, so the strides of others mean something else."""
    caches = {"a": _caches(["a"], (9, 32, 2, 64))["a"].transpose(1, 2)}
    with pytest.raises(LayoutError, match="dense pages"):
        describe(caches, _config(["a"]), backends={"a": "CPU_ATTN/vec"}, heads=(0, 2))


def test_missing_layer_is_named() -> None:
    with pytest.raises(LayoutError, match="'b'"):
        describe(_caches(["a"]), _config(["a", "b"]), backends={"a": "x"}, heads=(0, 2))


@pytest.mark.parametrize(
    ("total", "ranks", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_heads_of_ranks(total: int, ranks: int, expected: list[tuple[int, int]]) -> None:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    assert [local_heads(config, rank) for rank in range(ranks)] == expected
