"""``kvferry top`` as a user runs it, against local servers with pages of metrics."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import signal
import socket
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.top import report, scrape
from kvferry.cli.top.scrape import (
    MAX_BYTES,
    MAX_SAMPLES,
    MAX_VALUE,
    MetricsAddress,
    MetricsPageError,
    MetricsReading,
    parse,
)
from kvferry.core.metrics import MetricKind
from kvferry.integrations.vllm.scheduler_metrics import METRICS
from tests.cli.command import COMMAND, ROOT, Command

ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
RUNNING = b'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
NOBODY = "127.0.0.1:1"  # an address at which nobody listens
QUICK = ("--once", "--interval", "0.1", "--timeout", "60")
Answers = tuple[bytes | int | None, ...]
Top = Callable[..., Any]


def recorded(engine: str, number: int) -> bytes:
    """Return a page that a real engine, ``prefill`` or ``decode``, once had.

    Page 1 (of decode) follows 12 hand-overs. Before page 2 (of prefill), three requests were
    prefilled, and one of their tickets was used for another prompt. Before page 3, the leases of
    all three ended, one was read too late, and 3 more were handed over.
    """
    return (Path(__file__).parent / "top_pages" / f"{engine}-{number}.txt").read_bytes()


DECODE = recorded("decode", 1), recorded("decode", 3)
PREFILL = recorded("prefill", 2), recorded("prefill", 3)


class MetricsServer(ThreadingHTTPServer):
    """Answers on a free port with pages or HTTP statuses, and repeats the last one.

    After ``None`` it keeps the connection open, without an answer.
    """

    def __init__(self, *answers: bytes | int | None) -> None:
        super().__init__(("127.0.0.1", 0), PageHandler)
        self.answers, self.requests, self.closed = answers, 0, threading.Event()
        self.address = f"127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def server_close(self) -> None:
        self.closed.set()
        self.shutdown()
        super().server_close()


class PageHandler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        answers = self.server.answers
        answer = answers[min(self.server.requests, len(answers) - 1)]
        self.server.requests += 1
        if answer is None:
            self.server.closed.wait()
            return
        status, page = (answer, b"") if isinstance(answer, int) else (200, answer)
        self.send_response(status)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextlib.contextmanager
def served(*servers: Answers | bytes) -> Iterator[list[str]]:
    """Serve pages, and yield the address of each server."""
    with contextlib.ExitStack() as stack:
        answers = [one if isinstance(one, tuple) else (one,) for one in servers]
        yield [stack.enter_context(MetricsServer(*each)).address for each in answers]


@pytest.fixture
def once(command: Command) -> Top:
    """A function that runs ``kvferry top --once --json`` on servers, and returns the engines."""

    def run(*servers: Answers | bytes, status: int = 0, addresses: tuple[str, ...] = ()) -> Any:
        with served(*servers) as asked:
            ran = command.run("top", *addresses, *asked, *QUICK, "--json")
        assert (ran.status, ran.err) == (status, "")
        return json.loads(ran.out)["engines"]

    return run


@pytest.fixture
def screen(command: Command) -> Top:
    """A function that runs ``kvferry top --once`` on servers, and returns the lines it prints."""

    def run(*servers: Answers | bytes, width: int = 100) -> list[str]:
        with served(*servers) as asked:
            lines = command.run("top", *asked, *QUICK, width=width).out.splitlines()
        assert max(map(len, lines)) <= width
        return lines

    return run


def test_engines_are_shown_with_what_changed_between_two_readings(once: Top) -> None:
    prefill, decode = once(PREFILL, DECODE)
    seconds = decode["seconds"]
    assert decode["loads_per_second"] * seconds == pytest.approx(3)
    assert decode["tokens_per_second"] * seconds == pytest.approx(420)
    assert decode["failed_loads"] == {"total": 1.0, "new": 1.0}
    shown = ("error", "running", "waiting", "peers_up")
    assert [decode[name] for name in shown] == [None, 0.0, 0.0, 1.0]
    [pull] = decode["pulls"]
    assert (pull["peer"], pull["paths"]) == ("prefill-0", ["process_vm"])
    assert pull["pulls_per_second"] * seconds == pytest.approx(3)
    stages = ["wait", "handshake", "check", "post", "transfer", "fence"]
    assert list(pull["seconds_per_pull"]) == stages
    assert 0 < pull["seconds_per_pull"]["wait"] < 0.1
    assert {(one["what"], one["peer"]) for one in decode["problems"]} == {
        ("load failed at fence: stale", "prefill-0"),
        ("ticket refused: prompt", ""),
    }
    [before] = once(PREFILL[0])
    outcomes, share = before["holds"].pop("outcomes"), 14 / 512
    assert before["holds"] == {"pages": 14.0, "share_of_cache": share, "share_of_limit": share}
    assert outcomes["made"] == {"total": 15.0, "new": 0.0}
    assert prefill["holds"]["pages"] == 0
    assert [(one["what"], one["counted"]) for one in prefill["problems"]] == [
        ("hold expired before it was read", {"total": 3.0, "new": 3.0}),
        ("done after expiry", {"total": 1.0, "new": 1.0}),
    ]


def test_screen_has_the_documented_tables(screen: Top) -> None:
    lines = screen(PREFILL, DECODE)
    assert re.match(r"kvferry top  2 engines, rates over [0-9.]+ s", lines[0])
    for title in ("Engines", "Who pulls from whom", "Held for decode", "What failed"):
        assert any(line.startswith(title) for line in lines)
    documented = [line.split() for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()]
    headings = [line.split() for line in lines if not re.search(r"\d", line)]
    assert [line for line in headings if line not in documented] == []
    rows = {"load failed at fence: stale prefill-0 1 +1", "0 0% 0% 18 +3 15 +3 0 3 +3"}
    assert rows <= {" ".join(line.split()[1:]) for line in lines}
    for width in (80, 50):
        shown = "\n".join(screen(DECODE, width=width))
        assert ("handshake    0" in shown) == (width == 50)
        assert "prefill-0" in shown


RESTARTED = DECODE[1].replace(b"process_start_time_seconds 1.7", b"process_start_time_seconds 1.8")
"""An engine that was restarted, and has counted more than before."""
BEFORE = b"\n".join(line for line in DECODE[0].split(b"\n") if b"loads" not in line)
"""An engine before its first load."""


@pytest.mark.parametrize(
    ("before", "after", "loads"),
    [(*DECODE[::-1], 12), (DECODE[0], RESTARTED, 15), (BEFORE, DECODE[0], 12)],
    ids=["less than before", "more than before", "not there before"],
)
def test_counter_that_was_reset_or_is_new_counts_from_zero(
    once: Top, before: bytes, after: bytes, loads: int
) -> None:
    [engine] = once((before, after))
    assert engine["loads_per_second"] * engine["seconds"] == pytest.approx(loads)


def test_engine_that_does_not_answer_stays_listed_and_comes_back() -> None:
    with (
        MetricsServer(DECODE[0], 503, DECODE[1]) as server,
        subprocess.Popen(
            [*COMMAND, "top", "--interval", "0.2", "--json", server.address],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        ) as process,
    ):
        assert process.stdout is not None
        reports = (json.loads(line)["engines"] for line in process.stdout)
        [silent], [back], [idle] = itertools.islice(reports, 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert (silent["name"], silent["error"]) == (server.address, "answers with HTTP status 503")
    assert back["loads_per_second"] * back["seconds"] == pytest.approx(3)
    assert idle["loads_per_second"] == 0


def test_silent_engines_are_named_with_the_reason_and_the_others_are_shown(once: Top) -> None:
    nameless = b"vllm:num_requests_running 1\n"
    servers = DECODE[0], (404,), b"<html></html>", RUNNING, nameless
    found = once(*servers, addresses=(NOBODY,), status=1)
    assert [one["error"] for one in found] == [
        "does not answer: Connection refused",
        None,
        "answers with HTTP status 404: is this the port of vLLM's server?",
        "the page has no metric of vLLM: expected a page like /metrics",
        "has no metrics of kvferry",
        "the page has no metric of an engine",
    ]


def test_other_engines_are_read_while_some_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked without the proxy of the environment, and one that still answers once."""
    monkeypatch.setattr(scrape, "LATE_SECONDS", 0)
    monkeypatch.setenv("http_proxy", f"http://{NOBODY}")
    connections: list[socket.socket] = []
    closed = threading.Event()

    def drip() -> None:  # a header that never ends
        with contextlib.suppress(OSError):
            connections.append(listener.accept()[0])
            connections[-1].sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not closed.wait(0.1):
                connections[-1].sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener, served((None,), DECODE[0]) as others:
        for _ in range(2):
            threading.Thread(target=drip, daemon=True).start()
        dripping = f"127.0.0.1:{listener.getsockname()[1]}"
        scraper = scrape.Scraper(list(map(MetricsAddress.parse, (dripping, *others))), timeout=0.3)
        outcome: object = None
        while not isinstance(outcome, MetricsReading):  # on a busy machine, not at the first time
            *late, outcome = scraper.scrape()
            assert [str(one) for one in late] == ["does not answer: no page within 0.3 s"] * 2
        scraper.close()
        closed.set()
    [connection] = connections
    connection.close()


def test_staging_is_shown_where_an_engine_stages(once: Top, screen: Top) -> None:
    staged = b"".join(
        b'vllm:kvferry_host_pages{engine="0",use="%s"} 40\n'
        b'vllm:kvferry_host_pages_used{engine="0",use="%s"} %d\n' % (use, use, used)
        for use, used in ((b"holds", 10), (b"loads", 30))
    )
    copied = b'vllm:kvferry_peer_seconds_total{engine="0",peer="prefill-0",stage="copy"} 0.06\n'
    servers = (DECODE[0], DECODE[1] + copied), PREFILL[0] + staged
    loading, holding = once(*servers)
    assert loading["pulls"][0]["seconds_per_pull"]["copy"] == pytest.approx(0.02)
    assert (loading["host_pages_used"], holding["host_pages_used"]) == (None, 0.75)
    assert holding["holds"]["share_of_cache"] is None
    lines = screen(*servers)
    assert any(line.split()[-2:] == ["fence", "copy"] for line in lines)
    assert any("process_vm" in line and line.split()[-1] == "20" for line in lines)
    assert any(line.endswith(" 75%") for line in lines)


def test_engines_of_one_page_are_told_apart(once: Top) -> None:
    line = 'vllm:kvferry_loads_total{engine="%d"} 1\nvllm:num_requests_running{engine="%d"} 1%d\n'
    found = once("".join(line % (n, n, n) for n in (0, 1)).encode())
    assert [(one["name"][-2:], one["running"]) for one in found] == [("#0", 10.0), ("#1", 11.0)]


def test_names_of_peers_cannot_steer_the_terminal(screen: Top) -> None:
    page = "".join(
        f'vllm:kvferry_{name}_total{{engine="0",peer="{peer}"}} 1\n'
        for name in ("pulls", "lost_peers")
        for peer in ("[red]\x1b[2J\\n", "\x1b]0;title\x07")
    )
    lines = screen(page.encode() + RUNNING)
    for part in ("[red]?[2J", "?]0;title?"):
        assert part in "\n".join(lines)
    assert all(line.isprintable() for line in lines)


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 100))
    before, shown = termios.tcgetattr(slave), b""
    with MetricsServer(*DECODE) as server:
        process = subprocess.Popen(
            [*COMMAND, "top", "--interval", "0.2", server.address],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=ENVIRONMENT | {"TERM": "xterm"},
            start_new_session=True,
        )
        while b"What failed" not in shown or b"rates over" not in shown:
            shown += os.read(master, 1 << 16)
        process.send_signal(signal.SIGINT)
        while b"\x1b[?1049l" not in shown:
            shown += os.read(master, 1 << 16)
        assert process.wait(60) == 0
    os.set_blocking(master, False)
    with contextlib.suppress(BlockingIOError):
        shown += os.read(master, 1 << 16)
    assert termios.tcgetattr(slave) == before
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert b"Traceback" not in shown
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize(
    ("written", "url", "name"),
    [
        ("10.0.0.1:8000", "http://10.0.0.1:8000/metrics", "10.0.0.1:8000"),
        ("https://a/metrics", "https://a/metrics", "a"),
        ("http://a/one/metrics", "http://a/one/metrics", "a/one/metrics"),
        ("http://a/metrics?x=1", "http://a/metrics?x=1", "a/metrics?x=1"),
        ("[::1]:8000", "http://[::1]:8000/metrics", "[::1]:8000"),
        *((each, "", "") for each in ("", ":8000", "ftp://a", "file:///etc/passwd", "a:port")),
        *((each, "", "") for each in ("a:70000", "http://u:p@a", "a b", "a\n", "a:0", "[::")),
    ],
)
def test_address_may_be_url_or_host_and_port(written: str, url: str, name: str) -> None:
    if url:
        assert MetricsAddress.parse(written) == (url, name)
        return
    with pytest.raises(MetricsPageError, match=r"is no address of a page of metrics: give HOST"):
        MetricsAddress.parse(written)


def test_address_that_is_given_twice_is_read_once(command: Command) -> None:
    with MetricsServer(DECODE[0]) as server:
        assert command.run("top", server.address, f"http://{server.address}", *QUICK).status == 0
        assert server.requests == 2


def test_metrics_that_are_shown_are_defined() -> None:
    names = {f"{m.name}{'_total' if m.kind is MetricKind.COUNTER else ''}" for m in METRICS}
    source = Path(report.__file__).read_text()
    used = {name for name in names if f'"{name}"' in source}
    assert {"bytes_total", "held_pages", "loads_total", "peers_down", "pulls_total"} <= used
    assert set(report.PROBLEMS) <= names


# Pages.


def test_values_that_are_no_number_and_lines_of_other_metrics_are_left_out() -> None:
    values = {"a": "12", "b": "NaN", "c": "+Inf", "d": str(2 * MAX_VALUE), "e\\n": "-1e3"}
    lines = (f'vllm:kvferry_held_pages{{peer="{peer}"}} {n}\n' for peer, n in values.items())
    others = b'vllm:kvferry_load_seconds_bucket{le="?\nother{ not a metric\n\n# what\n'
    found = parse("".join(lines).encode() + others)
    assert found == {
        "vllm:kvferry_held_pages": {(("peer", "a"),): 12.0, (("peer", "e\n"),): -1000.0}
    }


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_damaged_page_is_read_or_refused(damage: bytes, position: int) -> None:
    with contextlib.suppress(MetricsPageError):
        parse(DECODE[1][:position] + damage + DECODE[1][position:])


MALFORMED = "has a malformed line: vllm:kvferry_"


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"<html>vllm:</html>", "no metric of vLLM"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"#" * (MAX_BYTES + 1), "more than 8,388,608 bytes"),
        (b"vllm:kvferry_a 1\n" * (MAX_SAMPLES + 1), "more than 50,000 values"),
        (b"vllm:kvferry_loads_total", MALFORMED),
        (b'vllm:kvferry_loads_total{engine="0",engine="1"} 1', MALFORMED),
        (b"vllm:kvferry_loads_total{} 1 \x1b[2J", MALFORMED),
        # a parser that tries every way to read these would take minutes.
        (b"vllm:kvferry_a{%s} x" % (b" " * 200_000), MALFORMED),
        (b"vllm:kvferry_a{%s} x" % (b'a="b",' * 200_000), MALFORMED),
    ],
    ids=range(9),
)
def test_other_pages_are_refused_with_the_reason(page: bytes, reason: str) -> None:
    with pytest.raises(MetricsPageError, match=reason) as refused:
        parse(page)
    assert str(refused.value).isprintable()


def test_a_page_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    opener = MagicMock()
    opener.open.return_value.__enter__.return_value.read1.return_value = b"#"
    monkeypatch.setattr(scrape, "_OPENER", opener)
    given_up = scrape.read(MetricsAddress.parse(NOBODY), 0.0)
    assert str(given_up) == "does not answer: no page within 0 s"
