"""``make serve`` with real servers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.serving import serve
from tests.engines.http_server import post
from tests.examples.test_serve import ROOT, processes
from tests.free_port import free_port
from tests.waiting import eventually

STAMP = ".venv/.installed-kvferry"


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = post(url, body)
    assert status == 200, answer
    found: dict[str, Any] = json.loads(answer)
    return found


class Output:
    """The lines that a process prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._stdout = process.stdout
        self._seen: list[str] = []

    def find(self, text: str) -> str:
        """Return the next line that contains a text."""
        for line in self._stdout:
            self._seen.append(line)
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in: {''.join(self._seen)}")


def check_requests(make: subprocess.Popen[str], first: int) -> set[int]:
    """Ask for a completion and for a chat; return the sessions of the servers and the router."""
    output = Output(make)
    [curl, url, header, _, flag, data] = shlex.split(output.find("curl http"))
    assert (curl, header, flag) == ("curl", "-H", "-d")
    body = json.loads(data)
    completion = ask(url, body)
    tokens = completion["usage"]["prompt_tokens"]
    assert f"1 request: {tokens} tokens" in output.find("request")

    messages = [{"role": "user", "content": "How are you today, and why?"}]
    chat = ask(
        url.replace("/v1/completions", "/v1/chat/completions"),
        {"model": body["model"], "messages": messages, "max_tokens": 16},
    )
    more = chat["usage"]["prompt_tokens"]
    assert f"1 request: {more} tokens" in output.find("request")
    counted = serve.read_counters(first + serve.DECODE)
    assert counted is not None
    assert (counted["loads"], counted["tokens"]) == (2, tokens + more)
    assert counted["failed"] == counted["refused"] == 0

    ticket = {"do_remote_prefill": True, "remote_engine_id": "made up"}
    decode = url.replace(f":{first}/", f":{first + serve.DECODE}/")
    computed = ask(decode, {**body, "temperature": 0, "kv_transfer_params": ticket})
    loaded = ask(url, {**body, "temperature": 0})
    assert "1 not loaded" in output.find("not loaded")
    assert computed["choices"][0]["text"] == loaded["choices"][0]["text"]

    [script] = [process.pid for process in processes() if process.parent == make.pid]
    sessions = {process.session for process in processes() if process.parent == script}
    assert len(sessions) == len(["prefill", "decode", "router"])
    return sessions


@pytest.mark.timeout(900)
def test_make_serve_hands_requests_over_and_ends_all_on_an_interrupt(tmp_path: Path) -> None:
    pytest.importorskip("vllm_router")
    first = free_port(max(serve.PORTS) + 1)
    command = ["make", "-o", STAMP, "serve", f"SERVE_OPTIONS=--port {first} --folder {tmp_path}"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as make:
        try:
            sessions = check_requests(make, first)
        finally:
            os.killpg(make.pid, signal.SIGINT)  # as a terminal does
            make.communicate(timeout=60)
    # What it has killed at its end may take the kernel a moment.
    eventually(lambda: not sessions & {process.session for process in processes()})
    serve.check_ports(first)  # all are free again
