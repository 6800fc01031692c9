"""The check of a machine with a GPU, rehearsed on CPU memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from benchmarks.gpu_check.caches import PAGE_TOKENS, Cache, CacheShape
from benchmarks.gpu_check.contexts import ContextReport
from benchmarks.gpu_check.defaults import DRIVERS, SUITE_SECONDS, TOTAL_SECONDS
from benchmarks.gpu_check.devices import Device
from benchmarks.gpu_check.outcome import Outcome, Settings
from benchmarks.gpu_check.quiescence import count_changes
from benchmarks.gpu_check.report import RunReport
from benchmarks.gpu_check.runner import Step, StepResult, run_step
from benchmarks.gpu_check.steps import REHEARSED_SUITE_SECONDS, all_steps
from kvferry.testing.memory import available

ROOT = Path(__file__).parents[2]
CHECK = (sys.executable, "-m", "benchmarks.gpu_check")
MARK = "KVFERRY_TEST_MARK"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the check to its end."""
    return subprocess.run([*CHECK, *arguments], cwd=ROOT, capture_output=True, text=True)


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


def run(one: Step, folder: Path) -> StepResult:
    with (folder / "log.txt").open("wb") as log:
        return run_step(one, log)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment variable that every process has which the test starts."""
    value = uuid4().hex
    monkeypatch.setenv(MARK, value)
    return f"{MARK}={value}"


def wait_until_none_is(mark: str) -> None:
    """Wait for the end of killed processes; the time limit of tests ends the wait."""
    while marked(mark):
        time.sleep(0.01)


def marked(mark: str) -> list[int]:
    """Return the processes other than this one that have a variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or belongs to somebody else
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.skipif(available("cuda"), reason="there is a GPU")
def test_without_gpu_nothing_is_checked(tmp_path: Path) -> None:
    done = check("--out", str(tmp_path / "results"))
    assert done.returncode == 3
    assert "nothing was checked" in done.stdout
    assert not (tmp_path / "results").exists()


def test_step_that_raises_has_failed_and_says_why(tmp_path: Path) -> None:
    result = run(step(module="no_such_module"), tmp_path)
    assert result.status == "failed"
    assert "no_such_module" in result.outcome.problems[0]
    assert "Traceback" in result.tail


def test_step_that_takes_too_long_is_ended_with_its_processes(mark: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = run(step(module="conformance", limit=4.0), tmp_path)
    assert result.status == "timed out"
    assert "ended after 4 s" in result.outcome.problems[0]
    wait_until_none_is(mark)


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


def test_bytes_that_land_late_are_counted() -> None:
    torch = pytest.importorskip("torch")
    memory = torch.zeros(1024, dtype=torch.int32)
    late = threading.Timer(0.3, lambda: memory[:7].fill_(1))
    late.start()
    assert count_changes(Device("cpu"), memory) == 7
    late.join()
    assert count_changes(Device("cpu"), memory) == 0


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


def test_page_and_json_name_each_step(tmp_path: Path) -> None:
    passed, failed, missing = (step(name=name) for name in ("one", "two", "three"))
    tables: Any = {"speeds": [{"case": "a | b", "GB/s": 1.5}, {"case": "c", "ms": 2}]}
    good, bad = Outcome(tables=tables), Outcome(problems=["it broke"])
    results = [
        StepResult(step=passed, status="passed", seconds=1.0, outcome=good, tail=""),
        StepResult(step=failed, status="failed", seconds=1.0, outcome=bad, tail="the log"),
    ]
    report = RunReport(
        device="a GPU", rehearsal=False, steps=[passed, failed, missing], results=results
    )
    report.write(tmp_path)
    assert report.summary() == "1 of 3 steps passed; failed: two; not run: three"
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| a \\| b | 1.5 |  |" in page
    assert "- it broke" in page
    assert "the log" in page
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert record["failed"] == ["two"]
    assert [one["status"] for one in record["steps"]] == ["passed", "failed"]


def test_rehearsal_writes_results(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = check("--rehearse", "--only", "zeroing", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 steps passed" in done.stdout
    [result] = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["steps"]
    assert result["tables"]["zeroing"][0]["spans"] > 0


def test_rehearsal_of_staging_copies_both_ways(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = check("--rehearse", "--only", "staging", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["steps"]
    assert [(row["way"], row["memory"]) for row in result["tables"]["staging"]] == [
        ("to host pages", "unpinned"),
        ("from host pages", "unpinned"),
    ]


@pytest.mark.nixl
@pytest.mark.timeout(600)
def test_rehearsal_over_tcp_has_staged_beside_direct(tmp_path: Path) -> None:
    done = check("--rehearse", "--only", "staged", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["steps"]
    assert list(result["tables"]) == ["nixl, cpu from cpu, tcp", "nixl, cpu from cpu, tcp, staged"]
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert "tcp/" in log
    assert "sysv/" not in log
    assert "cma/" not in log


def test_driver_that_does_not_work_fails_its_step_alone(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    only = ("--only", "pieces", "--only", "zeroing")
    done = check("--rehearse", "--driver", "no-such", *only, "--out", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 2 steps passed; failed: pieces-no-such" in done.stdout
    assert "no driver 'no-such' is installed" in done.stdout


def test_steps_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = check("--rehearse", "--only", "zeroing", "--limit", "1", "--out", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "0 of 1 steps passed; not run: zeroing (it needs 20 s, and 1 s are left)" in done.stdout
    assert "not run: zeroing (it needs" in (tmp_path / "page.md").read_text(encoding="utf-8")
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert record["not run"] == list(record["skipped"]) == ["zeroing"]


def test_step_that_needs_more_than_is_left_does_not_stop_shorter_ones(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    only = ("--driver", "loopback", "--only", "loads", "--only", "zeroing")
    done = check("--rehearse", *only, "--limit", "34", "--out", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 2 steps passed; not run: loads-loopback (it needs 35 s, and" in done.stdout


def test_all_steps_fit_into_the_promised_time_if_nothing_hangs() -> None:
    steps = all_steps(rehearse=True, drivers=DRIVERS)
    suites = SUITE_SECONDS - REHEARSED_SUITE_SECONDS
    budgets = sum(suites for one in steps if one.module == "conformance")
    assert len(steps) == 15
    assert sum(one.needs for one in steps) + budgets <= TOTAL_SECONDS
    assert all(one.needs < one.limit for one in steps)


def test_interrupt_leaves_no_process(mark: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [*CHECK, "--rehearse", "--driver", "loopback", "--only", "loads"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with process:
        while len(marked(mark)) < 3:  # the check, the step, and the producer
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in said
    wait_until_none_is(mark)


@pytest.mark.nixl
@pytest.mark.ucx
@pytest.mark.timeout(1600)
def test_rehearsal_of_all_steps(tmp_path: Path) -> None:
    done = check("--rehearse", "--limit", "1500", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + (tmp_path / "log.txt").read_text(encoding="utf-8")
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert len(record["steps"]) == 15
    assert not record["failed"]
    [kill] = next(
        one["tables"]["8,192 copies, peer killed"]
        for one in record["steps"]
        if one["name"] == "quiescence-ucx"
    )
    assert kill["state"] == "FAILED"
