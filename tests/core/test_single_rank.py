"""``SingleRankEngine``; ``tests/test_examples.py`` has a whole hand-over between two of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvferry import (
    Endpoint,
    EndpointOptions,
    Layout,
    Results,
    SingleRankEngine,
    Ticket,
    paged_layout,
    region_of,
)
from kvferry.core.errors import (
    DriverError,
    EndpointClosedError,
    HandshakeError,
    LayoutError,
    TicketError,
)
from tests.core.layouts import STATE, plain_field

PAGES, TOKENS, HEADS, ELEMENTS = 8, 4, 2, 8
DIMS = ("page", "token", "head", "element")
PROMPT = list(range(6))


class Cache:
    """An array and its engine."""

    def __init__(self, name: str, options: EndpointOptions | None = None) -> None:
        self.array = np.full((PAGES, TOKENS, HEADS, ELEMENTS), np.nan, dtype=np.float32)
        layout = paged_layout({"layer": self.array}, DIMS)
        self.engine = SingleRankEngine(name, layout, options=options)

    def computed(self, request: str, pages: list[int]) -> Ticket:
        assert self.engine.begin_prefill(request)
        self.array[pages] = np.arange(self.array[pages].size).reshape(self.array[pages].shape)
        return self.engine.finish_prefill(request, PROMPT, pages)

    def until_received(self) -> Results:
        while not (results := self.engine.results(timeout=1.0)).received:
            pass
        return results

    def until_sent(self) -> Results:
        while not (results := self.engine.results(timeout=1.0)).sent:
            pass
        return results


@pytest.fixture
def prefill() -> Iterator[Cache]:
    cache = Cache("prefill")
    with cache.engine:
        yield cache


@pytest.fixture
def decode() -> Iterator[Cache]:
    cache = Cache("decode")
    with cache.engine:
        yield cache


def test_a_ticket_can_be_sent_as_json(prefill: Cache, decode: Cache) -> None:
    text = msgspec.json.encode(prefill.computed("theirs", [3, 1]))
    ticket = msgspec.json.decode(text, type=Ticket)
    decode.engine.load("ours", ticket, PROMPT, [2, 7])
    assert decode.until_received().failed == {}
    theirs = prefill.array[[3, 1]].reshape(-1, HEADS, ELEMENTS)
    ours = decode.array[[2, 7]].reshape(-1, HEADS, ELEMENTS)
    assert np.array_equal(theirs[: len(PROMPT)], ours[: len(PROMPT)])
    assert prefill.until_sent().sent == {"theirs"}


def test_an_engine_prefills_and_decodes_at_the_same_time(prefill: Cache, decode: Cache) -> None:
    forth, back = prefill.computed("one", [1, 2]), decode.computed("two", [1, 2])
    decode.engine.load("one here", forth, PROMPT, [3, 4])
    prefill.engine.load("two here", back, PROMPT, [3, 4])
    assert decode.until_received().failed == {}
    assert prefill.until_received().failed == {}


def test_a_slot_is_free_again_once_its_request_is_sent(prefill: Cache, decode: Cache) -> None:
    for turn in range(2 * PAGES):
        decode.engine.load(f"{turn} here", prefill.computed(f"{turn}", [1, 2]), PROMPT, [1, 2])
        assert decode.until_received().failed == {}
        assert prefill.until_sent().sent == {f"{turn}"}


def test_no_more_requests_are_held_than_there_are_pages(prefill: Cache) -> None:
    taken_on = [prefill.engine.begin_prefill(f"{n}") for n in range(PAGES + 1)]
    assert taken_on == [True] * PAGES + [False]
    prefill.engine.cancel_prefill("0")
    assert prefill.engine.begin_prefill("another")


def test_a_ticket_for_another_prompt_is_refused(prefill: Cache, decode: Cache) -> None:
    ticket = prefill.computed("theirs", [1, 2])
    with pytest.raises(TicketError, match="'theirs' was made for another prompt than that of 'our"):
        decode.engine.load("ours", ticket, PROMPT[::-1], [1, 2])
    assert decode.engine.endpoint.pending == 0


def test_a_request_that_was_begun_gets_one_ticket(prefill: Cache) -> None:
    with pytest.raises(TicketError, match="begin_prefill did not take it on"):
        prefill.engine.finish_prefill("unknown", PROMPT, [1, 2])
    prefill.computed("once", [1, 2])
    with pytest.raises(TicketError, match="or it has its ticket already"):
        prefill.engine.finish_prefill("once", PROMPT, [1, 2])


def test_pages_of_an_invalid_ticket_are_free_when_the_lease_ends() -> None:
    cache = Cache("prefill", EndpointOptions(lease=0.05))
    with cache.engine as engine:
        assert engine.begin_prefill("wrong")
        with pytest.raises(TicketError, match="more than once"):
            engine.finish_prefill("wrong", PROMPT, [1, 1])
        assert cache.until_sent().sent == {"wrong"}


def test_a_closed_engine_neither_serves_nor_loads(prefill: Cache, decode: Cache) -> None:
    ticket = prefill.computed("theirs", [1, 2])
    prefill.engine.close()
    prefill.engine.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ticket.host, ticket.port), timeout=5).close()
    with pytest.raises(EndpointClosedError):
        prefill.engine.load("ours", ticket, PROMPT, [1, 2])


def test_the_endpoint_is_closed_if_the_side_channel_cannot_listen(
    prefill: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = prefill.computed("theirs", [1, 2]).port
    closed: list[Endpoint] = []
    close = Endpoint.close

    def recording_close(self: Endpoint) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Endpoint, "close", recording_close)
    with pytest.raises(HandshakeError, match="the port is in use"):
        SingleRankEngine("other", paged_layout({"layer": prefill.array}, DIMS), port=port)
    assert [endpoint.problems for endpoint in closed] == [("the endpoint is closed",)]


def test_an_unknown_driver_is_refused_with_the_installed_ones() -> None:
    layout = paged_layout({"layer": np.zeros((2, 2, 2, 2), dtype=np.float32)}, DIMS)
    with pytest.raises(DriverError, match=r"no driver 'ferry' is installed; installed: .*loopback"):
        SingleRankEngine("engine", layout, driver="ferry")


def test_groups_of_states_are_refused() -> None:
    memory = np.zeros((4, 16), dtype=np.float32)
    state = plain_field(page_stride=64, pages=4, unit=64)
    layout = Layout(regions=(region_of(memory),), groups=(STATE,), fields=(state,))
    with pytest.raises(LayoutError, match=r"groups of kind state.*use Endpoint"):
        SingleRankEngine("engine", layout)


def test_device_memory_is_refused() -> None:
    array = np.zeros((2, 2, 2, 2), dtype=np.float32)
    cuda = replace(region_of(array), kind="cuda")
    layout = paged_layout({"layer": array}, DIMS).with_regions((cuda,))
    with pytest.raises(LayoutError, match=r"memory of kind cuda.*use Endpoint"):
        SingleRankEngine("engine", layout)
