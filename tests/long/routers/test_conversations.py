"""A conversation over HTTP, led by a router that keeps the tickets of decode's answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import PREFILL as WANTED
from tests.engines.engines import Engine
from tests.engines.http_server import HttpServer
from tests.long.routers.deployment import Servers
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)

BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
ANSWER_TOKENS = 70
"""Of an answer: more than ``kv_recompute_threshold``, and not a multiple of a block."""


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers that pull from each other, with prefix caching."""
    folder, sides = tmp_path_factory.mktemp("servers"), {"prefill": BOTH, "decode": BOTH}
    extra = {"bidirectional_kv_xfer": True, "kv_lease_duration": 15.0}
    options = {"enable_prefix_caching": True}
    started = Servers(checkpoint, folder, sides, extra=extra, options=options)
    with contextlib.closing(started):
        yield started.wait_started()


def prefilled(server: HttpServer) -> list[float]:
    """How many tokens of prompts an engine has computed, and pulled from another engine."""
    computed = server.counter("vllm:prompt_tokens_by_source", 'source="local_compute"')
    return [computed, server.pulled()]


def test_later_turns_compute_only_what_is_new(servers: Servers, reference: Engine) -> None:
    prefill, decode, model = servers["prefill"], servers["decode"], servers.model
    tokens, ticket, wanted = list[int](), WANTED, [0.0, 0.0]
    for turn, length in enumerate((57, 40, 33, 64)):
        wanted[0] += length + bool(turn)  # and the token that decode sampled last
        wanted[1] += ANSWER_TOKENS - 1 if turn else 0
        tokens += prompt(length, seed=turn)
        _, asked = prefill.complete(model, tokens, max_tokens=1, params=ticket)
        eventually(lambda: sum(prefilled(prefill)) >= sum(wanted))
        assert prefilled(prefill)[0] <= wanted[0]
        ticket = asked["kv_transfer_params"]
        _, answer = decode.complete(model, tokens, max_tokens=ANSWER_TOKENS, params=ticket)
        [expected] = reference.generate(tokens, max_tokens=ANSWER_TOKENS)
        assert answer["choices"][0]["text"] == expected.text
        ticket, tokens = answer["kv_transfer_params"], [*tokens, *expected.tokens]
