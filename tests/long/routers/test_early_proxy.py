"""``examples/serving/early_proxy.py`` between real servers: both legs of a request at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.engines import ROOT
from tests.long.routers.checks import (
    a_third_go_away,
    all_right,
    is_killed_and_returns,
    nothing_left,
)
from tests.long.routers.deployment import (
    DECODE,
    PREFILL,
    Router,
    Servers,
    free_port,
)
from tests.long.routers.questions import Question

pytestmark = pytest.mark.timeout(400)

CHUNK = 64
PROXY = ROOT / "examples" / "serving" / "early_proxy.py"


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """As those of the other routers, but prefill computes in chunks."""
    started = Servers(
        checkpoint,
        tmp_path_factory.mktemp("early_servers"),
        {"prefill": PREFILL, "decode": DECODE},
        extra={"kv_lease_duration": 15.0},
        options={"max_num_batched_tokens": CHUNK},
    )
    try:
        yield started.wait_started()
    finally:
        started.close()


@pytest.fixture
def router(servers: Servers, started: Callable[[Router], Router], tmp_path: Path) -> Router:
    port = free_port()
    command: list[str | Path] = [sys.executable, PROXY, "--port", str(port)]
    command += ["--prefill", servers["prefill"].address, "--decode", servers["decode"].address]
    return started(Router("early-proxy", command, port, "/health", tmp_path))


def test_every_text_is_right_and_caches_cross_early(
    servers: Servers, router: Router, questions: list[Question], texts: list[str]
) -> None:
    all_right(router, servers, questions, texts)
    assert servers["decode"].counter("vllm:kvferry_early_loads", "") > 0
    nothing_left(servers)


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_killed_server_returns(
    servers: Servers, router: Router, questions: list[Question], texts: list[str], side: str
) -> None:
    is_killed_and_returns(side, servers, router, questions, texts)


def test_a_third_of_the_clients_go_away(
    servers: Servers, router: Router, questions: list[Question], texts: list[str]
) -> None:
    a_third_go_away(servers, router, questions, texts)
