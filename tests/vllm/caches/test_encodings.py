"""What fields say about the elements of a quantised cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.integrations.vllm.caches import encodings
from kvferry.integrations.vllm.caches.encodings import Scales, cache_format, with_encodings
from kvferry.integrations.vllm.caches.pages import SINGLE_RANK, LayerFacts, ShardPosition

torch = pytest.importorskip("torch")


def layer(dtype: str, key: object = 1.0, value: object = 1.0) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_dtype=dtype, _k_scale=torch.tensor(key), _v_scale=torch.tensor(value)
    )


def said(
    module: object, *, heads: int = 4, position: ShardPosition = SINGLE_RANK, others: object = None
) -> str:
    """The encoding of one layer; ``others`` are the scales of all tensor-parallel ranks."""
    facts = {"layer": LayerFacts(backend="B", heads=heads)}

    def gather(own: dict[str, Scales]) -> list[dict[str, Scales]]:
        assert isinstance(others, list)
        assert own["layer"] == others[position.tp]
        return [{"layer": scales} for scales in others]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "gather", gather)
        return with_encodings(facts, {"layer": module}, position)["layer"].encoding


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_plain_numbers_need_no_word(dtype: str) -> None:
    assert said(layer(dtype, 0.5, 0.25)) == ""
    assert said(SimpleNamespace()) == ""  # no attention


@pytest.mark.parametrize(
    ("dtype", "known"),
    [
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("nvfp4", "nvfp4"),
        ("int8_per_token_head", "int8_per_token_head"),
        ("fp8_ds_mla", "fp8_ds_mla"),
    ],
)
def test_a_quantised_format_has_one_name(dtype: str, known: str) -> None:
    assert cache_format(dtype) == known
    assert said(layer(dtype)).startswith(f"{known}, ")


def test_another_kind_of_eight_bits_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    assert cache_format("fp8") == "fp8_e4m3fnuz"


def test_static_scales_are_named() -> None:
    """One scale for all heads of a layer is one scale; otherwise that of every head counts."""
    halves = "fp8_e4m3, scales k 0.5, v 0.25"
    assert said(layer("fp8", 0.5, 0.25)) == said(layer("fp8", [0.5] * 4, [0.25] * 4)) == halves
    assert said(SimpleNamespace(kv_cache_dtype="fp8")) == "fp8_e4m3, scales k 1.0, v 1.0"
    one, other = (
        said(layer("fp8", [0.5, 0.5, 0.5, 0.25])),
        said(layer("fp8", [0.5, 0.5, 0.25, 0.5])),
    )
    assert "of 4 heads" in one
    assert one != other


@pytest.mark.parametrize(
    ("alone", "shares"),
    [
        ([0.1, 0.2, 0.3, 0.4], [(0.1, 0.2), (0.3, 0.4)]),
        ([0.1, 0.2, 0.3, 0.4], [(0.1,), (0.2,), (0.3,), (0.4,)]),
        ([0.1, 0.2], [(0.1,), (0.1,), (0.1,), (0.1,), (0.2,), (0.2,), (0.2,), (0.2,)]),
        (0.5, [(0.5,), (0.5,)]),  # one of the layer
    ],
)
def test_ranks_that_split_heads_in_any_way_say_the_same(
    alone: object, shares: list[tuple[float, ...]]
) -> None:
    heads = len(alone) if isinstance(alone, list) else 4
    others = [(tuple(torch.tensor(each).tolist()), (1.0,)) for each in shares]
    for rank, share in enumerate(shares):
        position = ShardPosition(tp=rank, tp_size=len(shares))
        own = layer("fp8", share[0] if alone == 0.5 else list(share))
        text = said(own, heads=heads, position=position, others=others)
        assert text == said(layer("fp8", alone), heads=heads)
