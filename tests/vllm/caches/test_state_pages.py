"""The state of a recurrent layer lands where vLLM's own layer looks for it, however it is split."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.core.errors import LayoutError, PlanError
from kvferry.core.layout import GroupKind, Layout
from kvferry.core.planner.build_copies import Pages, ReadRequest, build_copies
from kvferry.core.planner.plan import make_plan
from kvferry.integrations.vllm.caches.pages import ShardPosition
from kvferry.integrations.vllm.caches.state_pages import delta, mamba1, mamba2
from tests.vllm.caches.recurrent import KINDS, Model, Rank, Setup, Truth

OURS, THEIRS = 1, 3
"""The pages that a request has on either side."""


def _engine(model: Model, setup: Setup, fill: int) -> list[Rank]:
    return [Rank(model, setup, rank, fill) for rank in range(setup.ranks)]


def _pull(local: Sequence[Layout], remote: Sequence[Layout]) -> int:
    """Every rank reads the state of one request; how many copies that took."""
    request = ReadRequest(
        ranges=((0, 7),),
        local=(Pages(ids=np.array([OURS])),),
        remote=(Pages(ids=np.array([THEIRS])),),
    )
    total = 0
    for rank in range(len(local)):
        ours = make_plan(local, remote, rank)
        for source in ours.sources:
            batch = build_copies(source, request)
            total += len(batch.nbytes)
            for near, far, nbytes in zip(batch.local, batch.remote, batch.nbytes, strict=True):
                ctypes.memmove(int(near), int(far), int(nbytes))
    return total


def _check(model: Model, here: Setup, there: Setup, **facts: Any) -> int:
    """Hand a state over; every byte of the reader's memory is as if it had computed it itself."""
    local, remote, expected = (
        _engine(model, setup, fill) for setup, fill in ((here, 0x55), (there, 0x33), (here, 0x55))
    )
    truth = Truth.of(model, local[0], seed=1)
    for ranks, page in ((remote, THEIRS), (expected, OURS)):
        for rank in ranks:
            rank.write(page, truth)
    ours, theirs = ([rank.layout(**facts) for rank in ranks] for ranks in (local, remote))
    count = _pull(ours, theirs)
    for rank, wanted in zip(local, expected, strict=True):
        assert rank.pages.equal(wanted.pages)
    return count


DESCRIBED_ON_CPU = [kind for kind in KINDS if kind != "linear"]  # its kernels are a GPU's only


@st.composite
def _setups(draw: st.DrawFn) -> Setup:
    return Setup(
        ranks=draw(st.sampled_from([1, 2, 3, 4, 6])),
        channels_first=draw(st.booleans()),
        drafts=draw(st.integers(0, 3)),
        padding=4 * draw(st.integers(0, 9)),
        device=draw(st.sampled_from(["cpu", "cuda"])),
    )


@st.composite
def _models(draw: st.DrawFn) -> Model:
    return Model(
        kind=draw(st.sampled_from(DESCRIBED_ON_CPU)),
        heads=12 * draw(st.integers(1, 2)),
        head=2 * draw(st.integers(1, 3)),
        size=2 * draw(st.integers(1, 3)),
        groups=draw(st.sampled_from([1, 12])),
    )


@given(_models(), _setups(), _setups())
@settings(deadline=None, max_examples=15)
@example(Model(kind="mamba1"), Setup(ranks=3), Setup(ranks=2, padding=8))
@example(Model(kind="mamba2"), Setup(ranks=2), Setup(ranks=4, channels_first=True, drafts=2))
@example(Model(kind="delta"), Setup(ranks=3, device="cuda"), Setup(ranks=2))
@example(Model(kind="kda"), Setup(ranks=2, drafts=1), Setup(ranks=3, channels_first=True))
@example(Model(kind="short"), Setup(channels_first=True), Setup(ranks=2))
def test_any_split_to_any_other(model: Model, here: Setup, there: Setup) -> None:
    """Either layout of the convolution, with and without speculation, padded, on any ranks."""
    if model.kind in ("delta", "kda"):
        model = replace(model, groups=12)  # vLLM never copies key heads
    _check(model, here, there)


@pytest.mark.parametrize(
    ("groups", "here", "there"),
    [
        *[(1, *sizes) for sizes in ((8, 1), (2, 4), (4, 4))],
        (2, 2, 1),  # vLLM splits no 2 groups among 4 ranks
        *[(8, *sizes) for sizes in ((1, 8), (4, 2))],
    ],
)
def test_groups(groups: int, here: int, there: int) -> None:
    """B and C are dealt out with their groups, or copied to every rank where there is only one."""
    model = Model(kind="mamba2", heads=8, groups=groups)
    _check(model, Setup(ranks=here), Setup(ranks=there))


@pytest.mark.parametrize(("here", "there"), [(1, 1), (1, 3), (3, 2)])
def test_matrices_of_linear_attention(here: int, there: int) -> None:
    setups = Setup(ranks=here, device="cuda"), Setup(ranks=there, device="cuda", padding=8)
    _check(Model(kind="linear"), *setups)


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("kind", DESCRIBED_ON_CPU)
def test_equal_layouts_are_one_copy_a_page(kind: str, channels_first: bool) -> None:
    setup = Setup(ranks=2, channels_first=channels_first)
    model = Model(kind=kind, groups=2)
    [group] = Rank(model, setup, 0, 0).layout().groups
    assert (group.kind, group.block_tokens) == (GroupKind.STATE, 0)
    assert _check(model, setup, replace(setup, padding=40)) == 2


@pytest.mark.parametrize("drafts", [(2, 2), (0, 2), (3, 0)])
def test_speculation_costs_one_more_copy(drafts: tuple[int, int]) -> None:
    """Columns first, its scratch lies behind the columns that are the state."""
    here, there = (Setup(drafts=number) for number in drafts)
    assert _check(Model(kind="mamba2"), here, there) == 2


def test_a_state_that_every_rank_holds() -> None:
    """Replicated states are read from any one rank, by however many."""
    model = Model(kind="short")
    local, remote = (_engine(model, Setup(), fill) for fill in (0x55, 0x33))
    truth = Truth.of(model, local[0], seed=1)
    remote[0].write(THEIRS, truth)
    for rank in (*local, *remote):
        rank.spec = replace(rank.spec, tp_replicated=True)
        rank.facts = replace(rank.facts, backend="PLE_SHORT_CONV_ATTN")
    theirs = []
    for tp in range(2):
        remote[0].position = ShardPosition(tp=tp, tp_size=2)
        theirs.append(remote[0].layout())
    _pull([local[0].layout()], theirs)
    local[0].write(2, truth)
    assert local[0].pages[OURS].equal(local[0].pages[2])


@pytest.mark.parametrize(("dtype", "like_gpus"), [("float16", True), ("bfloat16", False)])
def test_gated_delta_nets_in_float16_are_stored_as_on_gpus(dtype: str, like_gpus: bool) -> None:
    """On CPUs, too, in vLLM 0.33: ``cpu_gdn_attention_core`` in ``ops/cpu/gdn_attention.py``."""
    import torch

    rank = Rank(Model(kind="delta"), Setup(), 0, 0)
    types = (getattr(torch, dtype), *rank.spec.dtypes[1:])
    rank.spec = replace(rank.spec, dtypes=types)
    here, there = (rank.layout(backend=name).fields for name in ("GDN_ATTN/cpu", "GDN_ATTN"))
    assert [field.key for field in here] == [field.key for field in there]
    assert (here == there) == like_gpus


def _layouts(setup: Setup, **facts: Any) -> list[Layout]:
    return [rank.layout(**facts) for rank in _engine(Model(kind="mamba2", groups=2), setup, 0)]


@pytest.mark.parametrize("facts", [{"backend": "SOMEONE'S"}, {"groups": 0}, {"groups": 4}])
def test_what_does_not_add_up_moves_whole(facts: dict[str, Any]) -> None:
    """As it is, between engines that split it alike; nothing else."""
    ours = _layouts(Setup(ranks=2), **facts)
    assert [len(layout.fields) for layout in ours] == [1, 1]
    assert _check(Model(kind="mamba2", groups=2), Setup(ranks=2), Setup(ranks=2), **facts) == 2
    with pytest.raises(PlanError, match=r"is held by .* and by no remote rank"):
        make_plan(ours, _layouts(Setup(ranks=1), **facts), 0)


@pytest.mark.parametrize(
    ("described", "shapes"),
    [
        (mamba1, ((3, 7), (2, 3, 4))),
        (mamba2, ((3, 7), (2, 3))),
        (mamba2, ((3, 7), (1, 2, 2))),  # B and C would have 5 channels, in groups of 2
        (delta, ((3, 7), (2, 3))),
        (delta, ((3, 7), (2, 1, 4))),  # so would q and k
    ],
)
def test_shapes_of_other_layers_are_not_described(described: Any, shapes: Any) -> None:
    page = SimpleNamespace(
        spec=SimpleNamespace(shapes=shapes), facts=SimpleNamespace(channels_first=False)
    )
    assert described(page) == ()


@pytest.mark.parametrize(
    "there", [{"channels_first": True}, {"drafts": 1}, {"device": "cuda"}, {"ranks": 1}]
)
def test_whole_states_in_another_order_never_meet(there: dict[str, Any]) -> None:
    """Also where they are of one length."""
    facts = {"kernel": 6}  # which does not fit
    ours, theirs = (
        _layouts(Setup(ranks=2), **facts),
        _layouts(Setup(**{"ranks": 2, **there}), **facts),
    )
    with pytest.raises(PlanError, match="MAMBA2_ATTN"):
        make_plan(ours, theirs, 0)


@pytest.mark.parametrize(("kernel", "drafts"), [(0, 2), (5, 0), (3, 2), (1, 3)])
def test_a_convolution_of_unknown_width_moves_whole(kernel: int, drafts: int) -> None:
    """Which columns are the state cannot be told, or what is said does not fit the tensor."""
    [layout] = _layouts(Setup(drafts=drafts), kernel=kernel)
    assert len(layout.fields) == 1


def test_without_speculation_all_columns_are_the_state() -> None:
    _check(Model(kind="mamba2"), Setup(), Setup(ranks=2, channels_first=True), kernel=0)


def test_states_that_are_made_from_recent_inputs_are_refused() -> None:
    """What vLLM appends to a page for ReplaySSM is of no use without cursors from elsewhere."""
    rank = Rank(Model(kind="mamba2"), Setup(), 0, 0)
    shapes = (*rank.spec.shapes, (12, 16, 4), (12, 16), (1, 16, 3))
    rank.spec = replace(rank.spec, shapes=shapes, dtypes=(rank.spec.dtypes[0],) * 5)
    with pytest.raises(LayoutError, match=r"5 tensors.*--use-replayssm"):
        rank.layout()
