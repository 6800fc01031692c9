"""Servers for the tests of routers, and the texts of one ordinary engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.engines import Engine
from tests.engines.http_server import Program
from tests.long.routers.deployment import DECODE, PREFILL, Servers
from tests.long.routers.questions import MAX_TOKENS, Question, mixture

LEASE_SECONDS = 15.0
"""A hold whose ticket was lost on its way ends after this time, for which tests wait."""

REQUESTS = 100


@pytest.fixture(scope="session")
def questions() -> list[Question]:
    """A hundred requests: chat and completions, streamed and whole, of 5 to 500 tokens."""
    return mixture(REQUESTS)


@pytest.fixture(scope="session")
def texts(reference: Engine, questions: list[Question]) -> list[str]:
    """The texts of one ordinary engine."""
    prompts = [question.prompt for question in questions]
    found = [each.text for each in reference.generate(*prompts, max_tokens=MAX_TOKENS)]
    assert len(set(found)) == len(found)
    return found


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A prefill and a decode server; decode fails what it cannot load.

    They compute in chunks, so that parts of prompts can be read early.
    """
    started = Servers(
        checkpoint,
        tmp_path_factory.mktemp("servers"),
        {"prefill": PREFILL, "decode": DECODE},
        extra={"kv_lease_duration": LEASE_SECONDS},
        options={"max_num_batched_tokens": 64},
    )
    with contextlib.closing(started):
        yield started.wait_started()


@pytest.fixture
def started() -> Iterator[Callable[[Program], Program]]:
    """Waits until a router answers, and ends it after the test."""
    routers: list[Program] = []

    def start(router: Program) -> Program:
        routers.append(router)
        return router.wait_started()

    yield start
    for router in routers:
        router.close()


@pytest.fixture(scope="session")
def router_program() -> Path:
    """Where the program ``vllm-router`` is."""
    program = Path(sys.executable).with_name("vllm-router")
    if not program.exists():
        pytest.skip("vllm-router is not installed; `make venv` installs it")
    return program
