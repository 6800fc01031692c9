"""The worker half with stand-ins for its endpoint and for vLLM, which need not be installed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.directory import ProducerNews
from kvferry.core.endpoint import Load, Results
from kvferry.core.errors import KVFerryError, StaleError
from kvferry.core.lifecycle.holds import EndedHold, HoldEnd, RequestId
from kvferry.core.lifecycle.scheduler_holds import HoldOrders, NewTicket
from kvferry.core.lifecycle.silent_holds import Silence
from kvferry.core.lifecycle.ticket import PeerKey
from kvferry.core.metrics import LoadRecord
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.ticket_format import Part, read_ticket
from tests.core.messages import payload
from tests.integrations.vllm import without_vllm
from tests.integrations.vllm.halves import ticket

TICKET = read_ticket(ticket())
HOLD = TICKET.hold
SILENCE = Silence(request=RequestId("r"), hold=HOLD, age=4.0)


@pytest.fixture(scope="module")
def half() -> Iterator[Any]:
    """The names of ``metadata`` and ``worker``."""
    with without_vllm.modules("metadata", "worker") as modules:
        yield SimpleNamespace(**{name: each for one in modules for name, each in vars(one).items()})


@pytest.fixture
def endpoint() -> MagicMock:
    """A stand-in; vLLM's half asks it for its payload when it is made."""
    made = MagicMock(payload=payload(), problems=(), pending=0)
    made.take_wanted.return_value = frozenset()
    return made


def load(name: str) -> Load:
    return Load(request=RequestId(name), ticket=TICKET, ranges=(None,), local=())


def requests(*names: str) -> frozenset[RequestId]:
    return frozenset(map(RequestId, names))


def record(name: str, **figures: Any) -> LoadRecord:
    values: dict[str, Any] = {"engine": "prefill", "reads": True, "tokens": 4, "copies": 2}
    return LoadRecord(request=name, **(values | {"nbytes": 100, "seconds": 0.5} | figures))


def ended(name: str, end: HoldEnd | None, engine: str = "") -> EndedHold:
    return EndedHold(request=RequestId(name), end=end, engine=engine)


READY = HoldOrders(tickets=(NewTicket(request=RequestId("a"), hold=HOLD, lease=30.0),))


def test_a_step_is_applied_whole_and_in_order(half: Any, endpoint: MagicMock) -> None:
    """What proves tickets first, tickets before their loads, and refusals and aborts last."""
    marks: list[object] = []

    def passed() -> object:
        marks.append(object())
        return marks[-1]

    ranks = [payload(), payload()]
    step = half.StepMetadata(
        ranks=tuple(side.encode(one) for one in ranks),
        ticket_key=b"key",
        orders=READY,
        producers=ProducerNews(outcomes=((PeerKey.of(TICKET), KVFerryError("no answer")),)),
        prepare=(TICKET,),
        loads=(load("a"), load("b")),
        parts={
            "f": Part(ticket=TICKET, total=4, is_last=True),
            "g": Part(ticket=TICKET, total=5, is_last=False),
        },
        refused=(("c", "another prompt"),),
        aborted=("d", "e"),
    )
    worker = half.FerryWorker(endpoint, passed)
    worker.apply(step)
    [mark] = marks
    *first, refused, fourth, fifth, last = endpoint.method_calls
    assert first == [
        call.prove(b"key"),
        call.join(ranks),
        call.apply(READY, mark),
        call.prepare(TICKET),
        call.load(step.loads[0], mark),
        call.load(step.loads[1], mark),
        call.extend("f", TICKET, is_last=True),
        call.extend("g", TICKET, is_last=False),
    ]
    assert (refused[0], refused.args[0]) == ("refuse", "c")
    assert isinstance(refused.args[1], half.TicketError)
    assert "another prompt" in str(refused.args[1])
    assert [fourth, fifth] == [call.abort("d"), call.abort("e")]
    assert last == call.relay(step.producers)


@pytest.mark.parametrize(
    ("orders", "loads", "marks"),
    [
        (HoldOrders(), (), False),
        (HoldOrders(drops=(HOLD,)), (), False),
        (READY, (), True),
        (HoldOrders(watermarks=((HOLD, 32),)), (), True),
        (HoldOrders(), ("a",), True),
    ],
)
def test_the_device_is_marked_only_for_what_waits_for_it(
    half: Any, endpoint: MagicMock, orders: HoldOrders, loads: tuple[str, ...], marks: bool
) -> None:
    passed = MagicMock()
    step = half.StepMetadata(orders=orders, loads=tuple(load(name) for name in loads))
    half.FerryWorker(endpoint, passed).apply(step)
    assert passed.called is marks
    mark = passed.return_value if marks else None
    applied = [call.apply(orders, mark)] if orders else []
    assert endpoint.method_calls == [*applied, *(call.load(one, mark) for one in step.loads)]


def test_loads_with_pages_that_others_would_keep_and_that_lack_tokens_fail(
    half: Any, endpoint: MagicMock
) -> None:
    groups = CacheGroup(index=0, tokens=96), CacheGroup(index=1, tokens=96, window=80)
    starts = {"whole": (32, 96), "nothing skipped": (0, 0), "split": (96, 320)}
    endpoint.results.return_value = Results(
        received=requests(*starts),
        loads=tuple(record(name, first_tokens=first) for name, first in starts.items()),
    )
    assert not half.FerryWorker(endpoint, lambda: None).results().failed_recving
    worker = half.FerryWorker(endpoint, lambda: None, kept_elsewhere=groups)
    results = worker.results()
    assert results.finished_recving == set(starts)
    assert results.failed_recving == {"split"}


@pytest.mark.parametrize("follows", [True, False])
def test_what_ended_is_told_once(half: Any, endpoint: MagicMock, follows: bool) -> None:
    """Where nothing is logged by request, only holds that ended in an unusual way are."""
    read, expired = ended("b", HoldEnd.READ, "decode"), ended("c", HoldEnd.EXPIRED)
    endpoint.results.return_value = Results(
        ended=(ended("a", None), read, expired),
        loads=(record("d"), record("e", reads=False), record("f", error=StaleError("late"))),
    )
    worker = half.FerryWorker(endpoint, lambda: None, follows=follows)
    worker.results()
    report = worker.take_report()
    assert report.ended == ({"b": read} if follows else {}) | {"c": expired}
    assert report.loads == ({"d": record("d")} if follows else {})
    assert worker.take_report() is None


def test_a_report_has_what_changed_or_was_asked_for_once(half: Any, endpoint: MagicMock) -> None:
    """A rank that knows of no silent hold says so, too: the others wait for its answer."""
    rank, worker = endpoint.payload.rank, half.FerryWorker(endpoint, lambda: None)
    assert wire.decode_payload(worker.handshake.payload) == endpoint.payload
    endpoint.take_figures.side_effect = [None, {"pulls": {"loopback": 1}}]
    assert worker.take_stats() is None
    assert worker.take_stats().data == {"pulls": {"loopback": 1}}
    assert worker.take_report() is None
    for problems in (("it burns",), ()):
        endpoint.problems = problems
        assert worker.take_report() == half.RankReport(problems={rank: problems})
        assert worker.take_report() is None
    for silent in ([SILENCE], []):
        endpoint.silent.return_value = silent
        worker.apply(half.StepMetadata(asks_silent=True))
        assert worker.take_report() == half.RankReport(silent={rank: tuple(silent)})
        worker.apply(half.StepMetadata())
        assert worker.take_report() is None
    assert endpoint.silent.call_count == 2


def test_it_drains_when_it_ends(half: Any, endpoint: MagicMock) -> None:
    half.FerryWorker(endpoint, lambda: None, drain=3.0).close()
    assert endpoint.method_calls == [call.close(3.0)]


def test_what_several_ranks_say_of_one_request_is_put_together(half: Any) -> None:
    slow = record("a", nbytes=300, seconds=2.0, transfer_seconds=1.5)
    first = half.RankReport(
        loads={"a": record("a"), "b": record("b")},
        problems={0: ("ill",)},
        silent={0: (SILENCE,)},
        failed=frozenset({"a"}),
        over={0: ("r",)},
    )
    second = half.RankReport(
        loads={"a": slow},
        ended={"c": ended("c", HoldEnd.READ, "decode")},
        problems={1: ()},
        silent={1: ()},
        failed=frozenset({"b"}),
        over={1: ("r",)},
    )
    third = half.RankReport(ended={"c": ended("c", HoldEnd.EXPIRED)})
    both = first.aggregate(second).aggregate(third).aggregate(object())
    assert (both.problems, both.silent) == ({0: ("ill",), 1: ()}, {0: (SILENCE,), 1: ()})
    assert (both.failed, both.over) == ({"a", "b"}, {0: ("r",), 1: ("r",)})
    assert both.loads == {
        "a": record("a", nbytes=400, copies=4, seconds=2.0, transfer_seconds=1.5),
        "b": record("b"),
    }
    assert both.ended == {"c": ended("c", HoldEnd.EXPIRED)}


@pytest.mark.parametrize(
    ("step", "state", "after", "least", "most"),
    [
        ({}, {"pending": 1, "problems": ("it burns",), "held": 1}, 60.0, 0.0, 0.0),
        ({"idle": True}, {}, 60.0, 0.0, 0.0),
        ({"idle": True}, {"pending": 1}, 0.0, 0.004, 0.02),
        ({"idle": True}, {"problems": ("it burns",)}, 0.0, 0.004, 0.02),
        ({"idle": True, "follows": True}, {"pending": 1}, 0.0, 0.0005, 0.002),
        # For held pages it waits the longer the less was computed.
        ({"idle": True}, {"held": 1}, 0.02, 0.001, 0.003),
        ({"idle": True}, {"held": 1}, 60.0, 0.004, 0.02),
    ],
)
def test_a_step_waits_only_if_it_runs_nothing(
    half: Any,
    endpoint: MagicMock,
    monkeypatch: pytest.MonkeyPatch,
    step: dict[str, bool],
    state: dict[str, Any],
    after: float,
    least: float,
    most: float,
) -> None:
    endpoint.configure_mock(**{"pending": 0, "problems": (), "held": 0} | state)
    endpoint.results.return_value = Results()
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    worker = half.FerryWorker(endpoint, lambda: None)
    worker.take_report()
    now[0] += after
    worker.apply(half.StepMetadata(**step))
    worker.results()
    waited = sum(each.args[0] for each in endpoint.wait.call_args_list)
    assert least <= waited <= most


def test_a_step_that_follows_a_report_of_loads_does_not_wait(
    half: Any, endpoint: MagicMock
) -> None:
    """With asynchronous scheduling, it would delay what vLLM does with the report."""
    endpoint.pending = 1
    endpoint.results.side_effect = [Results(received=requests("a")), Results(), Results()]
    worker, waited = half.FerryWorker(endpoint, lambda: None), []
    for _ in range(3):
        worker.apply(half.StepMetadata(idle=True))
        worker.results()
        waited.append(endpoint.wait.call_count)
    assert waited == [1, 1, 2]
