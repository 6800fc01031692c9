"""``LoadState``: what is known and measured of one load."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.core.driver_calls.transfers import Read
from kvferry.core.endpoint.load import Load, LoadState
from kvferry.core.errors import EndpointClosedError
from kvferry.core.layout import HOLE, Group, GroupKind
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.load_machine import LoadId, LoadMachine
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.planner.build_copies import Pages
from tests.core.messages import ticket

MACHINE = LoadMachine(
    id=LoadId(1),
    actions=[],
    hold=Hold(slot=3, generation=7),
    computed=True,
    reads=True,
    deadline=0.0,
)


def load_of(ranges: tuple[tuple[int, int] | None, ...] = ((2, 8), None, (0, 4))) -> Load:
    local = (Pages(ids=np.array([5, HOLE, 6], dtype=np.int64), first_index=0),)
    return Load(request=RequestId("d-1"), ticket=ticket(), ranges=ranges, local=local)


def state_of(load: Load, **how: Any) -> LoadState:
    return LoadState(machine=MACHINE, load=load, begun=1.0, **how)


def read(begun: float = 5.0, seconds: float = 3.0, post: float = 1.0, nbytes: int = 10) -> Read:
    """Return a read that has landed."""
    unused: Any = None
    read = Read(connection=unused, build=unused, landed=unused, lost=unused)
    read.copies, read.nbytes, read.begun = 2, nbytes, begun
    read.seconds, read.post_seconds = seconds, post
    return read


def test_bytes_of_several_ranks_are_summed_and_the_longest_times_kept() -> None:
    state = state_of(load_of(), handshake_succeeded=2.0)
    state.add(read())
    state.add(read(4.0, 7.0, 2.5))
    assert (state.copies, state.nbytes) == (4, 20)
    times = state.check_seconds, state.post_seconds, state.transfer_seconds
    assert times == (3.0, 2.5, 4.5)


def test_holes_do_not_count_as_pages_and_remote_pages_are_the_tickets() -> None:
    state = state_of(load_of())
    assert state.pages == 2
    [remote] = state.request.remote
    assert (remote.ids.tolist(), remote.first_index) == ([1, 2], 4)
    assert state.request.ranges == load_of().ranges
    with pytest.raises(EndpointClosedError, match="handshake is not over"):
        _ = state.known_peer


def part(*pages: tuple[int, ...], generation: int = 7) -> Ticket:
    """Return a part, or a ticket, of a producer with a group for each of these."""
    return ticket(generation, pages=pages, first_index=(0,) * len(pages))


def early(first: Ticket) -> LoadState:
    load = load_of(((0, 8), (0, 8), None))
    load = dataclasses.replace(load, ticket=first, is_early=True)
    return state_of(load, handshake_succeeded=2.0)


def test_a_ticket_before_the_first_early_read_does_not_add_to_what_is_read_early() -> None:
    pairing = SimpleNamespace(local=Group(kind=GroupKind.PAGED, block_tokens=4))
    matches = [SimpleNamespace(local_group=n, remote_group=n, pairing=pairing) for n in (0, 1)]
    source: Any = SimpleNamespace(remote=0, matches=matches)
    state = early(part((1,), ()))
    state.extend(part((1, 2), (3, 4)), is_last=True)
    assert state.request_for(source, 0, 4).ranges == ((0, 4), None, None)
    assert state.request_for(source, 4, None).ranges == ((4, 8), (0, 8), None)


def test_figures_of_an_early_load_are_of_its_last_hold_and_count_from_its_last_part() -> None:
    state = early(part((1,)))
    state.add(read(), is_early=True)
    state.extend(part((1,), generation=8), is_last=False)
    state.add(read(), is_early=True, is_discarded=True)
    state.add(read(nbytes=3), is_early=True)
    before = time.perf_counter()
    state.extend(part((1, 2), generation=8), is_last=True)
    assert state.record(None, None).seconds <= time.perf_counter() - before
    state.add(read(state.begun + 1.0))
    record = state.record(None, None)
    assert record.handshake_seconds == 0.0
    assert record.check_seconds == pytest.approx(1.0)
    assert record.post_seconds == 1.0
    assert (record.nbytes, record.early_nbytes) == (33, 3)
