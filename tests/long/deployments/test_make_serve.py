"""``make serve`` with real servers."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from examples.serving import serve
from tests.engines.steps import eventually
from tests.examples.test_serve import ROOT, STAMP, check_requests, free_ports, processes


@pytest.mark.timeout(900)
def test_make_serve_hands_requests_over_and_ends_all_on_an_interrupt(tmp_path: Path) -> None:
    pytest.importorskip("vllm_router")
    first = free_ports()
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
