"""``kvferry top`` as a user runs it, against local servers with pages of metrics."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

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
from kvferry.integrations.vllm.metric_definitions import METRICS
from tests.cli.command import COMMAND, ROOT, Command
from tests.cli.metrics_server import MetricsServer, recorded

ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
RUNNING = b'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
NOBODY = "127.0.0.1:1"
"""An address at which nobody listens."""
QUICK = ("--once", "--interval", "0.1", "--timeout", "60")


Once = Callable[..., list[dict[str, Any]]]
Screen = Callable[..., str]


@pytest.fixture
def once(command: Command) -> Once:
    """A function that runs ``kvferry top --once --json``, and returns the engines."""

    def run(*addresses: str, status: int = 0) -> list[dict[str, Any]]:
        ran = command.run("top", *addresses, *QUICK, "--json")
        assert (ran.status, ran.err) == (status, "")
        engines: list[dict[str, Any]] = json.loads(ran.out)["engines"]
        return engines

    return run


@pytest.fixture
def screen(command: Command) -> Screen:
    """A function that runs ``kvferry top --once`` in 100 columns, and returns what it prints."""
    return lambda *addresses: command.run("top", *addresses, *QUICK, width=100).out


def only(engines: list[dict[str, Any]]) -> dict[str, Any]:
    [engine] = engines
    return engine


def test_decode_is_shown_with_rates_between_two_readings(once: Once) -> None:
    with MetricsServer(recorded("decode", 1), recorded("decode", 3)) as server:
        engine = only(once(server.address))
    seconds = engine["seconds"]
    assert (engine["name"], engine["error"]) == (server.address, None)
    assert engine["loads_per_second"] * seconds == pytest.approx(3)
    assert engine["tokens_per_second"] * seconds == pytest.approx(420)
    assert engine["failed_loads"] == {"total": 1.0, "new": 1.0}
    assert (engine["running"], engine["waiting"], engine["peers_up"]) == (0.0, 0.0, 1.0)
    pull = only(engine["pulls"])
    assert (pull["peer"], pull["paths"]) == ("prefill-0", ["process_vm"])
    assert pull["pulls_per_second"] * seconds == pytest.approx(3)
    stages = ["wait", "handshake", "check", "post", "transfer", "fence"]
    assert list(pull["seconds_per_pull"]) == stages
    assert 0 < pull["seconds_per_pull"]["wait"] < 0.1
    assert pull["seconds_per_pull"]["handshake"] == 0
    assert {(one["what"], one["peer"]) for one in engine["problems"]} == {
        ("load failed at fence: stale", "prefill-0"),
        ("ticket refused: prompt", ""),
    }


def test_prefill_is_shown_with_what_it_holds(once: Once) -> None:
    with MetricsServer(recorded("prefill", 2)) as server:
        holds = only(once(server.address))["holds"]
    assert (holds["pages"], holds["share_of_cache"]) == (14.0, 14 / 512)
    assert holds["share_of_limit"] == 14 / 512
    assert holds["outcomes"]["made"] == {"total": 15.0, "new": 0.0}
    assert holds["outcomes"]["read"] == {"total": 12.0, "new": 0.0}


def test_holds_that_expired_are_shown_as_a_problem(once: Once) -> None:
    with MetricsServer(recorded("prefill", 2), recorded("prefill", 3)) as server:
        engine = only(once(server.address))
    assert engine["holds"]["pages"] == 0
    assert [(one["what"], one["counted"]) for one in engine["problems"]] == [
        ("hold expired before it was read", {"total": 3.0, "new": 3.0}),
        ("done after expiry", {"total": 1.0, "new": 1.0}),
    ]


def test_screen_has_every_table_in_100_columns(screen: Screen) -> None:
    with (
        MetricsServer(recorded("prefill", 2), recorded("prefill", 3)) as prefill,
        MetricsServer(recorded("decode", 1), recorded("decode", 3)) as decode,
    ):
        shown = screen(prefill.address, decode.address)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert re.match(r"kvferry top  2 engines, rates over [0-9.]+ s", lines[0])
    for title in ("Engines", "Who pulls from whom", "Held for decode", "What failed"):
        assert any(line.startswith(title) for line in lines)
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = [line.split() for line in page.splitlines()]
    headings = [line.split() for line in lines if not re.search(r"\d", line)]
    assert [line for line in headings if line not in documented] == []
    cells = [line.split() for line in lines]
    assert [decode.address, "load", "failed", "at", "fence:", "stale"] in [one[:6] for one in cells]
    assert any(one[:3] == [decode.address, "prefill-0", "process_vm"] for one in cells)
    assert [prefill.address, *["0", "0%", "0%", "18", "+3", "15", "+3", "0", "3", "+3"]] in cells


@pytest.mark.parametrize("width", [80, 50])
def test_screen_fits_a_narrow_terminal(command: Command, width: int) -> None:
    with MetricsServer(recorded("decode", 1), recorded("decode", 3)) as decode:
        shown = command.run("top", decode.address, *QUICK, width=width).out
    assert max(map(len, shown.splitlines())) <= width
    assert ("handshake    0" in shown) == (width == 50)
    assert "prefill-0" in shown


RESTARTED = recorded("decode", 3).replace(
    b"process_start_time_seconds 1.7", b"process_start_time_seconds 1.8"
)
"""An engine that was restarted, and has counted more than before."""
BEFORE = b"\n".join(line for line in recorded("decode", 1).split(b"\n") if b"loads" not in line)
"""An engine before its first load."""


@pytest.mark.parametrize(
    ("before", "after", "loads"),
    [
        (recorded("decode", 3), recorded("decode", 1), 12),
        (recorded("decode", 1), RESTARTED, 15),
        (BEFORE, recorded("decode", 1), 12),
    ],
    ids=["less than before", "more than before", "not there before"],
)
def test_counter_that_was_reset_or_is_new_counts_from_zero(
    once: Once, before: bytes, after: bytes, loads: int
) -> None:
    with MetricsServer(before, after) as server:
        engine = only(once(server.address))
    assert engine["loads_per_second"] * engine["seconds"] == pytest.approx(loads)


def test_engine_that_does_not_answer_stays_listed_and_comes_back() -> None:
    command = [*COMMAND, "top", "--interval", "0.2", "--json"]
    with MetricsServer(recorded("decode", 1), 503, recorded("decode", 3)) as server:
        process = subprocess.Popen(
            [*command, server.address], stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
        )
        with process:
            assert process.stdout is not None
            reports = (only(json.loads(line)["engines"]) for line in process.stdout)
            silent, back, idle = itertools.islice(reports, 3)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    assert (silent["name"], silent["error"]) == (server.address, "answers with HTTP status 503")
    assert back["error"] is None
    assert back["loads_per_second"] * back["seconds"] == pytest.approx(3)
    assert idle["loads_per_second"] == 0


def test_silent_engines_are_named_with_the_reason_and_the_others_are_shown(once: Once) -> None:
    with (
        MetricsServer(recorded("decode", 1)) as decode,
        MetricsServer(404) as elsewhere,
        MetricsServer(b"<html></html>") as other,
        MetricsServer(RUNNING) as plain,
        MetricsServer(b"vllm:num_requests_running 1\n") as nameless,
    ):
        addresses = [decode, elsewhere, other, plain, nameless]
        found = once(NOBODY, *(one.address for one in addresses), status=1)
    assert [one["error"] for one in found] == [
        "does not answer: Connection refused",
        None,
        "answers with HTTP status 404: is this the port of vLLM's server?",
        "the page has no metric of vLLM: expected a page like /metrics",
        "has no metrics of kvferry",
        "the page has no metric of an engine",
    ]


NO_PAGE = "does not answer: no page within 0.3 s"


def test_other_engines_are_read_while_some_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked without the proxy of the environment, and one that still answers once."""
    monkeypatch.setattr(scrape, "LATE_SECONDS", 0)
    monkeypatch.setenv("http_proxy", f"http://{NOBODY}")
    with (
        DrippingServer() as dripping,
        MetricsServer(None) as silent,
        MetricsServer(recorded("decode", 1)) as decode,
    ):
        addresses = [MetricsAddress.parse(one.address) for one in (dripping, silent, decode)]
        scraper = scrape.Scraper(addresses, timeout=0.3)
        outcome: object = None
        while not isinstance(outcome, MetricsReading):  # on a busy machine, not at the first time
            *late, outcome = scraper.scrape()
            assert [str(one) for one in late] == [NO_PAGE] * 2
        scraper.close()
    assert dripping.requests == 1


class DrippingServer:
    """Answers each connection with a byte of a header that never ends, ten times a second."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.requests += 1
                threading.Thread(target=self._drip, args=(connection,), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self._closed.wait(0.1):
                connection.sendall(b"x")


def test_holds_by_outcome_and_share_of_limit_are_shown(once: Once, screen: Screen) -> None:
    outcomes = ("made", "read", "abandoned", *report.LOST, "refused")
    page = RUNNING + b'vllm:kvferry_held_fraction{engine="0"} 0.25\n'
    for number, outcome in enumerate(outcomes, 1):
        page += f'vllm:kvferry_holds_total{{engine="0",outcome="{outcome}"}} {number}\n'.encode()
    with MetricsServer(page) as server:
        engine = only(once(server.address))
        lines = screen(server.address).splitlines()
    assert engine["holds"]["share_of_limit"] == 0.25
    totals = {name: counted["total"] for name, counted in engine["holds"]["outcomes"].items()}
    assert totals == {outcome: number for number, outcome in enumerate(outcomes, 1)}
    assert {one["what"]: one["counted"]["total"] for one in engine["problems"]} == {
        "hold expired before it was read": 4,
        "hold evicted before it was read": 5,
        "hold orphaned before it was read": 6,
        "hold revoked before it was read": 7,
    }
    [row] = [line.split() for line in lines if " 25%" in line]
    assert row == [server.address, "-", "-", "25%", "1", "2", "3", "22"]


def test_staging_is_shown_where_an_engine_stages(once: Once, screen: Screen) -> None:
    staged = b"".join(
        b'vllm:kvferry_host_pages{engine="0",use="%s"} %d\n'
        b'vllm:kvferry_host_pages_used{engine="0",use="%s"} %d\n' % (use, pages, use, used)
        for use, pages, used in ((b"holds", 40, 10), (b"loads", 40, 30))
    )
    copied = b'vllm:kvferry_peer_seconds_total{engine="0",peer="prefill-0",stage="copy"} 0.06\n'
    prefill = recorded("prefill", 2) + staged
    pages = recorded("decode", 1), recorded("decode", 3) + copied
    # Each run reads twice.
    with MetricsServer(*pages, *pages) as decode, MetricsServer(prefill) as other:
        loading, holding = once(decode.address, other.address)
        lines = screen(decode.address, other.address).splitlines()
    assert loading["pulls"][0]["seconds_per_pull"]["copy"] == pytest.approx(0.02)
    assert (loading["host_pages_used"], holding["host_pages_used"]) == (None, 0.75)
    assert holding["holds"]["share_of_cache"] is None
    assert max(map(len, lines)) <= 100
    assert any(line.split()[-2:] == ["fence", "copy"] for line in lines)
    [pulls] = [line.split() for line in lines if "process_vm" in line]
    assert pulls[-1] == "20"
    assert any(line.startswith(other.address) and line.endswith(" 75%") for line in lines)


def test_engines_of_one_page_are_told_apart(once: Once) -> None:
    page = b"".join(
        b'vllm:kvferry_loads_total{engine="%d"} 1\nvllm:num_requests_running{engine="%d"} %d\n'
        % (engine, engine, 10 + engine)
        for engine in (0, 1)
    )
    with MetricsServer(page) as server:
        found = once(server.address)
    assert [(one["name"], one["running"]) for one in found] == [
        (f"{server.address}#0", 10.0),
        (f"{server.address}#1", 11.0),
    ]


def test_names_of_peers_cannot_steer_the_terminal_and_long_lists_are_cut(screen: Screen) -> None:
    page = (
        'vllm:kvferry_pulls_total{engine="0",peer="[red]\x1b[2J\\n"} 1000\n'
        'vllm:kvferry_lost_peers_total{engine="0",peer="\x1b]0;title\x07"} 1000\n'
    )
    page += "".join(
        f'vllm:kvferry_{name}_total{{engine="0",peer="peer-{number}"}} {number + 1}\n'
        for name in ("pulls", "lost_peers")
        for number in range(59)
    )
    with MetricsServer(page.encode() + RUNNING) as server:
        shown = screen(server.address)
    for part in ("[red]?[2J", "?]0;title?", "20 more", "40 more"):
        assert part in shown
    assert all(line.isprintable() for line in shown.splitlines())


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    before = termios.tcgetattr(slave)
    command = [*COMMAND, "top", "--interval", "0.2"]
    with MetricsServer(recorded("decode", 1), recorded("decode", 3)) as server:
        process = subprocess.Popen(
            [*command, server.address],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=ENVIRONMENT | {"TERM": "xterm"},
            start_new_session=True,
        )
        shown = b""
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
        ("http://a:8000", "http://a:8000/metrics", "a:8000"),
        ("https://a/metrics", "https://a/metrics", "a"),
        ("http://a/one/metrics", "http://a/one/metrics", "a/one/metrics"),
        ("http://a/metrics?x=1", "http://a/metrics?x=1", "a/metrics?x=1"),
        ("[::1]:8000", "http://[::1]:8000/metrics", "[::1]:8000"),
    ],
)
def test_address_may_be_url_or_host_and_port(written: str, url: str, name: str) -> None:
    address = MetricsAddress.parse(written)
    assert (address.url, address.name) == (url, name)


@pytest.mark.parametrize(
    "written",
    [
        *("", ":8000", "ftp://a", "file:///etc/passwd", "a:port", "a:70000", "http://u:p@a", "a b"),
        "a\n",
    ],
)
def test_other_addresses_are_refused(written: str) -> None:
    with pytest.raises(MetricsPageError, match=r"is no address of a page of metrics: give HOST"):
        MetricsAddress.parse(written)


def test_address_that_is_given_twice_is_read_once(once: Once) -> None:
    with MetricsServer(recorded("decode", 1)) as server:
        assert len(once(server.address, f"http://{server.address}/metrics")) == 1
        assert server.requests == 2


def test_metrics_that_are_shown_are_defined() -> None:
    names = {f"{m.name}{'_total' if m.kind is MetricKind.COUNTER else ''}" for m in METRICS}
    source = Path(report.__file__).read_text()
    used = {name for name in names if f'"{name}"' in source}
    assert {"bytes_total", "held_pages", "loads_total", "peers_down", "pulls_total"} <= used
    assert set(report.PROBLEMS) <= names


# Pages.


def test_values_that_are_no_number_are_left_out() -> None:
    values = {"a": "12", "b": "NaN", "c": "+Inf", "d": str(2 * MAX_VALUE), "e\\n": "-1e3"}
    lines = (f'vllm:kvferry_held_pages{{peer="{peer}"}} {n}\n' for peer, n in values.items())
    found = parse("".join(lines).encode())["vllm:kvferry_held_pages"]
    assert found == {(("peer", "a"),): 12.0, (("peer", "e\n"),): -1000.0}


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_damaged_page_is_read_or_refused(damage: bytes, position: int) -> None:
    page = recorded("decode", 3)
    with contextlib.suppress(MetricsPageError):
        parse(page[:position] + damage + page[position:])


@pytest.mark.parametrize(
    "line",
    [
        "vllm:kvferry_loads_total",
        'vllm:kvferry_loads_total{engine="0" 1',
        'vllm:kvferry_loads_total{engine="0",engine="1"} 1',
        "vllm:kvferry_loads_total{} 1 \x1b[2J",
    ],
)
def test_malformed_line_is_named(line: str) -> None:
    with pytest.raises(
        MetricsPageError, match="line 2 is malformed: vllm:kvferry_loads"
    ) as refused:
        parse(RUNNING + f"{line}\n".encode())
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (b"", "no metric of vLLM"),
        (b"<html>vllm:</html>", "no metric of vLLM"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"#" * (MAX_BYTES + 1), "more than 8,388,608 bytes"),
    ],
)
def test_other_pages_are_refused(page: bytes, reason: str) -> None:
    with pytest.raises(MetricsPageError, match=reason):
        parse(page)


def test_number_of_values_is_bounded() -> None:
    page = "".join(f'vllm:kvferry_loads_total{{p="{n}"}} 1\n' for n in range(MAX_SAMPLES + 1))
    with pytest.raises(MetricsPageError, match="more than 50,000 values"):
        parse(page.encode())


@pytest.mark.parametrize("part", [" ", 'a="b",'])
def test_long_lines_do_not_take_time(part: str) -> None:
    """A parser that tries every way to read them would take minutes."""
    with pytest.raises(MetricsPageError, match="line 1 is malformed"):
        parse(f"vllm:kvferry_a{{{part * 200_000}}} x".encode())


def test_lines_of_other_metrics_are_skipped_unread() -> None:
    lines = b'vllm:kvferry_load_seconds_bucket{le="?\nother{ not a metric\n\n# what\n'
    assert list(parse(RUNNING + lines)) == ["vllm:num_requests_running"]
