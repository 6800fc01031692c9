"""The check of a machine with a GPU: exit statuses, time limits, and what it counts as wrong."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import quiescence, steps
from benchmarks.gpu_check.caches import PAGE_TOKENS, Cache, CacheShape
from benchmarks.gpu_check.contexts import ContextReport
from benchmarks.gpu_check.defaults import DRIVERS, SUITE_SECONDS, TOTAL_SECONDS
from benchmarks.gpu_check.devices import Device
from benchmarks.gpu_check.outcome import Settings
from benchmarks.gpu_check.runner import Step
from kvferry.testing.memory import available


def step(**changes: Any) -> Step:
    fields: dict[str, Any] = {
        "name": "zeroing",
        "title": "zeroes",
        "module": "zeroing",
        "needs": 1.0,
        "limit": 60.0,
        "settings": Settings(near="cpu", far="cpu", driver="loopback"),
    }
    return Step(**(fields | changes))


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """A function that runs the check with results in a folder, and returns its exit status."""
    before = signal.getsignal(signal.SIGTERM)

    def run_check(*arguments: str) -> int:
        out = str(tmp_path / "results")
        monkeypatch.setattr("sys.argv", ["gpu_check", *arguments, "--out", out])
        return gpu_check.main()

    yield run_check
    signal.signal(signal.SIGTERM, before)


def test_without_gpu_nothing_is_checked(
    check: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if available("cuda"):
        pytest.skip("there is a GPU")
    assert check() == 3
    assert "nothing was checked" in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_steps_that_fail_or_do_not_fit_any_more_fail_the_check_and_stop_no_others(
    check: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    names, needs = ("one", "two", "three"), (1.0, 1000.0, 1.0)
    found = [
        step(name=name, needs=seconds, module="no_such_module")
        for name, seconds in zip(names, needs, strict=True)
    ]
    monkeypatch.setattr(steps, "all_steps", lambda **_: found)
    assert check("--rehearse", "--limit", "500") == 1
    said = re.compile(
        r"0 of 3 steps passed; failed: one, three; "
        r"not run: two \(it needs 1000 s, and \d+ s are left"
    )
    assert said.search(capsys.readouterr().out)
    assert said.search((tmp_path / "results/page.md").read_text(encoding="utf-8"))
    record = json.loads((tmp_path / "results/results.json").read_text(encoding="utf-8"))
    assert record["not run"] == list(record["skipped"]) == ["two"]
    for one in record["steps"]:
        assert one["status"] == "failed"
        assert "no_such_module" in one["problems"][0]
        assert "Traceback" in one["log tail"]


def test_step_is_ended_when_the_time_of_all_steps_is_over(
    check: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    # It takes longer than that, and is begun however little is left.
    found = [step(name="one", needs=float("-inf"), module="conformance")]
    monkeypatch.setattr(steps, "all_steps", lambda **_: found)
    assert check("--rehearse", "--limit", "1") == 1
    said = capsys.readouterr().out
    assert "... timed out" in said
    assert "the step was ended after 0" in said
    assert "0 of 1 steps passed; failed: one" in said


def test_all_steps_fit_into_the_promised_time_if_nothing_hangs() -> None:
    found = steps.all_steps(rehearse=True, drivers=DRIVERS)
    suites = SUITE_SECONDS - steps.REHEARSED_SUITE_SECONDS
    budgets = sum(suites for one in found if one.module == "conformance")
    assert len(found) == 15
    assert sum(one.needs for one in found) + budgets <= TOTAL_SECONDS
    assert all(one.needs < one.limit for one in found)


def test_wrong_words_of_a_load_are_counted() -> None:
    pytest.importorskip("torch")
    cache = Cache(Device("cpu"), CacheShape(pages=8, layers=2, piece_bytes=4096))
    expected = cache.expected([3, 1], seed=5, tokens=2 * PAGE_TOKENS - 1)
    cache.fill([4, 2], seed=5, tokens=2 * PAGE_TOKENS - 1)
    index = cache.index([4, 2])
    assert cache.wrong_words(index, expected) > 0  # other pages have other content
    cache.words[[4, 2]] = expected
    assert cache.wrong_words(index, expected) == 0
    cache.words[2, 1, -1] = 1  # of a token that the request does not have
    assert cache.wrong_words(index, expected) == 1
    cache.poison([4])
    assert cache.wrong_words(index, expected) == 1 + 2 * 1024


def test_bytes_that_land_late_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    memory = torch.zeros(1024, dtype=torch.int32)
    later: Iterator[Callable[[], object]] = iter(
        [lambda: memory[:7].fill_(1), lambda: monkeypatch.setattr(quiescence, "WATCH_SECONDS", 0)]
    )
    monkeypatch.setattr(quiescence, "WATCH_SECONDS", float("inf"))
    monkeypatch.setattr(quiescence, "time", SimpleNamespace(sleep=lambda _: next(later)()))
    assert quiescence.count_changes(Device("cpu"), memory) == 7


def contexts(**changes: Any) -> ContextReport:
    """Return the report of a process in which all is well, with some changes."""
    fields: dict[str, Any] = {
        "entered": {"MainThread": 1, "kvferry-endpoint": 1},
        "contexts": {"MainThread": 0x10, "kvferry-endpoint": 0x10},
        "not_entered": [],
        "native_threads": {"python": 2},
        "active": [1],
        "used_mib": {"0": 500, "1": 900},
    }
    return ContextReport(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"not_entered": ["nixl-1"]}, "thread nixl-1 chose no device"),
        ({"entered": {"nixl-1": 0}}, "thread nixl-1 is on device 0, not 1"),
        ({"contexts": {"nixl-1": 0}}, "thread nixl-1 has no context"),
        ({"contexts": {"nixl-1": 0x10, "nixl-2": 0x20}}, "threads have different contexts"),
        ({"active": [0, 1]}, "a stray context on GPU 0"),
    ],
)
def test_thread_or_context_on_a_wrong_device_is_a_problem(
    changes: dict[str, Any], problem: str
) -> None:
    assert contexts().problems(1) == []
    [found] = contexts(**changes).problems(1)
    assert found.startswith(problem)
