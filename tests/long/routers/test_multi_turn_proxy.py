"""Conversations through the multi-turn proxy of vLLM's source, with ``bidirectional_kv_xfer``.

The proxy is a copy, changed to get decode's tickets from vLLM 0.32: see `adapted_proxy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.engines import Engine
from tests.engines.http_server import HttpServer, Program
from tests.long.routers.adapted_proxy import adapted
from tests.long.routers.chats import Chat, ask_each
from tests.long.routers.deployment import (
    HEALTH,
    MULTI_TURN,
    Servers,
    proxy,
)

pytestmark = pytest.mark.timeout(400)

BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
CLIENTS = 6
ANSWER_TOKENS = 70
"""Of an answer: more than ``kv_recompute_threshold``, and not a multiple of a block."""


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers that pull from each other, with prefix caching."""
    started = Servers(
        checkpoint,
        tmp_path_factory.mktemp("servers"),
        {"prefill": BOTH, "decode": BOTH},
        extra={
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": 15.0,
            "kv_lease_duration": 15.0,
        },
        options={"enable_prefix_caching": True},
    )
    try:
        yield started.wait_started()
    finally:
        started.close()


@pytest.fixture
def router(
    servers: Servers, started: Callable[[Program], Program], vllm_source: Path, tmp_path: Path
) -> Program:
    """The proxy's copy. It overwrites ``remote_host`` by another name than the engines have."""
    script = adapted(vllm_source / MULTI_TURN, tmp_path)
    return started(proxy(script, HEALTH[MULTI_TURN], servers, tmp_path, host="localhost"))


def prefilled(server: HttpServer) -> tuple[float, float]:
    """How many tokens of prompts an engine has computed, and pulled from another engine."""
    pulled = server.pulled()
    assert pulled == server.counter("vllm:kvferry_tokens")
    computed = server.counter("vllm:prompt_tokens_by_source", 'source="local_compute"')
    return computed, pulled


def test_later_turns_compute_only_what_is_new(
    servers: Servers, router: Program, reference: Engine
) -> None:
    """Every answer of every turn is what one engine answers to the same prompt."""
    chats = [Chat(number, stream=number % 2 == 0) for number in range(CLIENTS)]
    for turn, length in enumerate((20, 40, 33, 64)):
        for number, chat in enumerate(chats):
            chat.say(length if turn else length + 37 * number)
        seen, before = sum(chat.seen for chat in chats), prefilled(servers["prefill"])
        ask_each(router.address, servers.model, chats, ANSWER_TOKENS)
        after = prefilled(servers["prefill"])
        computed, pulled = (now - then for now, then in zip(after, before, strict=True))
        new = sum(len(chat.asked[-1]) for chat in chats) - seen
        # The cache of an answer's last token is computed only if the engine went one step further.
        assert new <= computed <= new + CLIENTS
        assert pulled >= CLIENTS * (ANSWER_TOKENS - 1) if turn else pulled == 0
    assert servers["prefill"].counter("vllm:kvferry_refused_tickets") == 0
    prompts = [asked for each in chats for asked in each.asked]
    answers = [answer for each in chats for answer in each.answers]
    completions = reference.generate(*prompts, max_tokens=ANSWER_TOKENS)
    assert answers == [completion.tokens for completion in completions]
