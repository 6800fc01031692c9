"""The worker half with stand-ins for its endpoint and for vLLM, which need not be installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from kvferry.core import wire
from kvferry.core.endpoint import Load
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.ledger import Orders
from kvferry.core.lifecycle.ticket import Ticket
from tests.core.messages import payload

OURS = "kvferry.integrations.vllm."
MODULES = ("metadata", "replica", "stats", "worker")
"""Those that need vLLM when they are imported."""

HOLD = Hold(slot=1, generation=7)


@dataclass(frozen=True, kw_only=True)
class Results:
    """vLLM's ``KVConnectorTransferResults``."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The names of ``worker`` and ``metadata``, imported beside stand-ins for vLLM's modules."""
    package, there = "vllm.distributed.kv_transfer.kv_connector.v1", {}
    parts = package.split(".")
    for length in range(1, len(parts) + 1):
        there[".".join(parts[:length])] = ModuleType(".".join(parts[:length]))
    bases = ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata")
    base: Any = ModuleType(f"{package}.base")
    base.KVConnectorTransferResults = Results
    for name in bases:
        setattr(base, name, type(name, (), {"__slots__": ()}))
    metrics: Any = ModuleType(f"{package}.metrics")
    metrics.KVConnectorPromMetrics = object
    metrics.KVConnectorStats = dataclass(
        type("KVConnectorStats", (), {"__annotations__": {"data": dict[str, Any]}})
    )
    for module in (*there.values(), base, metrics):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, OURS + name, raising=False)
    worker, metadata = (importlib.import_module(OURS + name) for name in ("worker", "metadata"))
    yield SimpleNamespace(**{**vars(metadata), **vars(worker)})
    for name in MODULES:  # they know the stand-ins, and nobody else may meet them
        sys.modules.pop(OURS + name, None)


@pytest.fixture
def endpoint() -> MagicMock:
    """A stand-in; vLLM's half asks it for its payload when it is made."""
    return MagicMock(payload=payload(), problems=(), pending=0)


def ticket() -> Ticket:
    return Ticket(
        engine="prefill",
        incarnation=5,
        request="p",
        host="10.0.0.1",
        port=5600,
        hold=HOLD,
        pages=((1,),),
        first_index=(0,),
        tokens=4,
        digest=bytes(16),
        computed=True,
    )


def load(name: str) -> Load:
    return Load(request=RequestId(name), ticket=ticket(), ranges=(None,), local=())


READY = Orders(ready=((HOLD, 30.0),))


def test_a_step_is_applied_whole_and_in_order(half: Any, endpoint: MagicMock) -> None:
    """Tickets before the loads that follow them, and refusals and aborts last."""
    marks: list[object] = []

    def passed() -> object:
        marks.append(object())
        return marks[-1]

    ranks = [payload(), payload()]
    step = half.Step(
        ranks=tuple(wire.encode(one) for one in ranks),
        orders=READY,
        prepare=(ticket(),),
        loads=(load("a"), load("b")),
        refused=(("c", "another prompt"),),
        aborted=("d", "e"),
    )
    worker = half.FerryWorker(endpoint, passed)
    worker.apply(step)
    [mark] = marks
    *first, refused, fourth, fifth = endpoint.method_calls
    assert first == [
        call.join(ranks),
        call.apply(READY, mark),
        call.prepare(ticket()),
        call.load(step.loads[0], mark),
        call.load(step.loads[1], mark),
    ]
    assert (refused[0], refused.args[0]) == ("refuse", "c")
    assert isinstance(refused.args[1], half.TicketError)
    assert "another prompt" in str(refused.args[1])
    assert [fourth, fifth] == [call.abort("d"), call.abort("e")]


def test_an_empty_step_asks_the_endpoint_for_nothing(half: Any, endpoint: MagicMock) -> None:
    passed = MagicMock()
    half.FerryWorker(endpoint, passed).apply(half.Step())
    assert endpoint.method_calls == []
    assert not passed.called


@pytest.mark.parametrize(
    ("orders", "loads", "marks"),
    [
        (Orders(drops=(HOLD,)), (), False),
        (READY, (), True),
        (Orders(), ("a",), True),
    ],
)
def test_the_device_is_marked_only_for_what_waits_for_it(
    half: Any, endpoint: MagicMock, orders: Orders, loads: tuple[str, ...], marks: bool
) -> None:
    passed = MagicMock()
    step = half.Step(orders=orders, loads=tuple(load(name) for name in loads))
    half.FerryWorker(endpoint, passed).apply(step)
    assert passed.called is marks
    mark = passed.return_value if marks else None
    applied = [call.apply(orders, mark)] if orders else []
    assert endpoint.method_calls == [*applied, *(call.load(one, mark) for one in step.loads)]


def test_what_is_over_is_passed_on(half: Any, endpoint: MagicMock) -> None:
    endpoint.results.return_value = SimpleNamespace(
        sent=frozenset({"a"}), received=frozenset({"b", "c"}), failed={"c": KeyError()}
    )
    results = half.FerryWorker(endpoint, lambda: None).results()
    assert results.finished_sending == {"a"}
    assert results.finished_recving == {"b", "c"}
    assert results.failed_recving == {"c"}


def test_figures_are_passed_on_if_there_are_any(half: Any, endpoint: MagicMock) -> None:
    worker = half.FerryWorker(endpoint, lambda: None)
    endpoint.take_figures.return_value = None
    assert worker.take_stats() is None
    figures = {"pulls": {"loopback": 1}}
    endpoint.take_figures.return_value = figures
    assert worker.take_stats().data is figures


def test_health_is_told_when_it_changes(half: Any, endpoint: MagicMock) -> None:
    worker = half.FerryWorker(endpoint, lambda: None)
    assert worker.take_health() is None
    endpoint.problems = ("it burns",)
    assert worker.take_health().problems == {endpoint.payload.rank: ("it burns",)}
    assert worker.take_health() is None
    endpoint.problems = ()
    assert worker.take_health().problems == {endpoint.payload.rank: ()}


def test_it_publishes_its_payload_and_drains_when_it_ends(half: Any, endpoint: MagicMock) -> None:
    worker = half.FerryWorker(endpoint, lambda: None, drain=3.0)
    assert wire.decode_payload(worker.handshake.payload) == endpoint.payload
    worker.close()
    assert endpoint.method_calls == [call.close(3.0)]


@pytest.mark.parametrize(
    ("idle", "pending", "problems", "waits"),
    [
        (True, 1, (), True),
        (True, 0, ("it burns",), True),
        (True, 0, (), False),
        (False, 1, ("it burns",), False),
    ],
)
def test_a_step_waits_only_if_it_runs_nothing(
    half: Any,
    endpoint: MagicMock,
    idle: bool,
    pending: int,
    problems: tuple[str, ...],
    waits: bool,
) -> None:
    endpoint.pending, endpoint.problems = pending, problems
    endpoint.results.return_value = SimpleNamespace(sent=(), received=(), failed={})
    worker = half.FerryWorker(endpoint, lambda: None)
    worker.take_health()
    worker.apply(half.Step(idle=idle))
    worker.results()
    assert endpoint.wait.called is waits
