"""The check of a machine with a GPU: exit statuses, time limits, and what it counts as wrong."""

from __future__ import annotations

import copy
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.memory import available
from tests.long.gpu import __main__ as gpu
from tests.long.gpu.__main__ import Step
from tests.long.gpu.device import PAGE_TOKENS, Cache, CacheShape, ContextReport, Device


def step(**changes: Any) -> Step:
    """Return a step whose tests do not exist."""
    fields: dict[str, Any] = {"name": "one", "title": "nothing", "tests": ("no_such_file.py",)}
    return Step(**(fields | {"needs": 1.0, "limit": 60.0} | changes))


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """A function that runs the check with results in a folder, and returns its exit status."""
    before = signal.getsignal(signal.SIGTERM)

    def run_check(*arguments: str) -> int:
        out = str(tmp_path / "results")
        monkeypatch.setattr("sys.argv", ["gpu", *arguments, "--out", out])
        return gpu.main()

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
    steps = [step(), step(name="two", needs=1000.0), step(name="three")]
    monkeypatch.setattr(gpu, "all_steps", lambda *_: steps)
    assert check("--rehearse", "--limit", "500") == 1
    said = re.compile(
        r"0 of 3 steps passed; failed: one, three; "
        r"not run: two \(it needs 1000 s, and \d+ s are left"
    )
    assert said.search(capsys.readouterr().out)
    page = (tmp_path / "results/page.md").read_text(encoding="utf-8")
    assert said.search(page)
    assert re.findall("## (.*)", page) == ["one: failed", "two: skipped", "three: failed"]
    assert page.count("- pytest collected no tests") == 2
    assert "no_such_file" in (tmp_path / "results/log.txt").read_text(encoding="utf-8")


def test_step_is_ended_when_the_time_of_all_steps_is_over(
    check: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    # It takes longer than that, and is begun however little is left.
    found = step(needs=float("-inf"))
    monkeypatch.setattr(gpu, "all_steps", lambda *_: [found])
    assert check("--rehearse", "--limit", "0.1") == 1
    said = capsys.readouterr().out
    assert "... timed out" in said
    assert "the step was ended after 0" in said
    assert "0 of 1 steps passed; failed: one" in said


def test_all_steps_fit_into_the_promised_time_if_nothing_hangs() -> None:
    steps = list(gpu.all_steps(gpu.DRIVERS, gpu.SUITE_SECONDS))
    assert len(steps) == 11
    assert sum(one.needs for one in steps) <= gpu.TOTAL_SECONDS
    assert all(one.needs < one.limit for one in steps)


ENDED = {"ended": True}
PASSED = {"test": "a", "outcome": "passed", "seconds": 1, "text": "", "tables": [["t", {"ms": 1}]]}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "no tests"),
        ([{"collected": 0}, {"ended": True}], "no tests"),
        ([{"collected": 1}, {"began": "a"}], "a did not end"),
        ([{"collected": 1}, PASSED | {"outcome": "failed", "text": "E  boom"}, ENDED], "a: boom"),
    ],
)
def test_tests_that_fail_hang_or_are_missing_are_problems(lines: list[Any], problem: str) -> None:
    good: list[Any] = [{"collected": 1}, {"began": "a"}, PASSED, ENDED]
    assert gpu.judged(step(), [copy.deepcopy(good)]).status == "passed"
    found = gpu.judged(step(), [copy.deepcopy(good), copy.deepcopy(lines)])
    assert (found.status, found.tables["t"][0]) == ("failed", {"ms": 1})
    assert problem in found.problems[0]


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


def contexts(**changes: Any) -> ContextReport:
    """Return the report of a process in which all is well, with some changes."""
    threads = ("MainThread", "kvferry-endpoint")
    fields: dict[str, Any] = {
        "entered": dict.fromkeys(threads, 1),
        "contexts": dict.fromkeys(threads, 0x10),
        "not_entered": [],
        "active": [1],
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
