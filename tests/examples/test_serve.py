"""``make serve``: it serves, says what crossed, ends everything, and explains what goes wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.serving import serve
from tests.own_host import OWN_HOST

ROOT = Path(__file__).parents[2]


class Process(NamedTuple):
    """What ``/proc`` says of a process."""

    pid: int
    parent: int
    session: int


def processes() -> Iterator[Process]:
    """Yield every process that is not a zombie."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if state != "Z":
            yield Process(int(path.parent.name), int(parent), int(session))


FIRST_PORT = 20000  # a port of ``OWN_HOST`` that no other process can have


@pytest.fixture
def _own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HOST", OWN_HOST)


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    first = FIRST_PORT
    code = f"import sys; from examples.serving import serve; serve.HOST = {OWN_HOST!r}; "
    with socket.create_server((OWN_HOST, first + serve.DECODE)):
        run = subprocess.run(
            [*python(f"{code}sys.exit(serve.main())"), f"--port={first}", f"--folder={tmp_path}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert run.returncode == 1
    assert f"port {first + serve.DECODE}, for decode, cannot be used" in run.stderr
    assert "--port" in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def programs(tmp_path: Path, _own_host: None) -> Iterator[serve.Programs]:
    programs = serve.Programs(folder=tmp_path, environment=os.environ, signals=serve.Signals())
    yield programs
    programs.signals.received += 1
    programs.end()


def test_a_server_that_ends_early_is_named_with_the_end_of_its_log(
    programs: serve.Programs,
) -> None:
    program = programs.start("decode", python("print('out of memory'); raise SystemExit(3)"))
    with pytest.raises(serve.ServingError, match=r"decode has ended \(status 3\)") as raised:
        programs.wait_ready({"decode": FIRST_PORT})
    assert str(program.log) in str(raised.value)
    assert "    out of memory" in str(raised.value)


def test_what_a_server_leaves_behind_is_ended_too(programs: serve.Programs) -> None:
    child = "import time; time.sleep(1000)"
    program = programs.start(
        "prefill",
        python(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"),
    )
    session = program.process.pid
    while program.status is None:
        time.sleep(0.02)
    assert session in {process.session for process in processes()}
    programs.end()
    wait_until_gone(session)


def test_a_second_signal_kills_what_does_not_end(
    programs: serve.Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "GRACE_SECONDS", 1000.0)
    code = "import signal, time; say = lambda *_: print('.', flush=True); "
    code += "signal.signal(signal.SIGTERM, say); say(); [time.sleep(100) for _ in range(10)]"
    program = programs.start("prefill", python(code))
    wait_for_log(program, ".\n")
    ending = threading.Thread(target=programs.end)
    ending.start()
    wait_for_log(program, ".\n.\n")
    programs.signals.received += 1
    ending.join()
    wait_until_gone(program.process.pid)


def wait_for_log(program: serve.Program, text: str) -> None:
    while not program.log.read_text().startswith(text):
        time.sleep(0.02)


def wait_until_gone(session: int) -> None:
    while session in {process.session for process in processes()}:
        time.sleep(0.02)


def python(code: str) -> list[str]:
    """Return the command of a small program."""
    return [sys.executable, "-c", code]


def test_the_lines_say_what_crossed() -> None:
    none = dict.fromkeys(serve.COUNTERS, 0.0)
    one = {"loads": 1.0, "tokens": 512.0, "bytes": 2.1e6}
    one |= {"waited": 0.0002, "read": 0.0034, "pulls": 1.0}
    assert list(serve.describe(none)) == []
    assert list(serve.describe(none | one)) == [
        "1 request: 512 tokens, 2.10 MB, waited 0.2 ms, read in 3.4 ms"
    ]
    two = one | {"loads": 2.0, "pulls": 2.0}
    assert list(serve.describe(none | two)) == [
        "2 requests: 512 tokens, 2.10 MB, waited 0.1 ms, read in 1.7 ms on average"
    ]
    [line] = serve.describe(none | {"failed": 1.0})
    assert line.startswith("1 not loaded")
