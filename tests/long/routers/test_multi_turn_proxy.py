"""Conversations through the multi-turn proxy of vLLM's source, with ``bidirectional_kv_xfer``.

The proxy is a copy, changed to get decode's tickets from vLLM 0.32: see `adapted_proxy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.engines import OPTIONS, Engine
from tests.engines.http_server import HttpServer, Program
from tests.long.routers.adapted_proxy import adapted
from tests.long.routers.chats import Chat, ask_each
from tests.long.routers.checks import nothing_left
from tests.long.routers.deployment import (
    HEALTH,
    MULTI_TURN,
    Servers,
    proxy,
)

pytestmark = pytest.mark.timeout(400)

BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
TTL_SECONDS = 15.0
"""Of decode's holds for a next turn. Longer than a turn takes on a busy machine."""

CLIENTS = 6
BLOCK_TOKENS = OPTIONS["block_size"]
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
            "decoder_kv_blocks_ttl": TTL_SECONDS,
            "kv_lease_duration": 15.0,
        },
        options={"enable_prefix_caching": True},
    )
    try:
        yield started.wait_started()
    finally:
        started.close()


@pytest.fixture(scope="module")
def ordinary(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine("ordinary", checkpoint, tmp_path_factory.mktemp("ordinary")).wait_started()
    yield engine
    engine.close()


@pytest.fixture
def router(
    servers: Servers, started: Callable[[Program], Program], vllm_source: Path, tmp_path: Path
) -> Program:
    """The proxy's copy. It overwrites ``remote_host`` by another name than the engines have."""
    script = adapted(vllm_source / MULTI_TURN, tmp_path)
    return started(proxy(script, HEALTH[MULTI_TURN], servers, tmp_path, host="localhost"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """How many tokens of prompts an engine has computed, and pulled from another engine."""

    computed: float
    pulled: float

    def __sub__(self, other: Prefilled) -> Prefilled:
        return Prefilled(computed=self.computed - other.computed, pulled=self.pulled - other.pulled)


def prefilled(server: HttpServer) -> Prefilled:
    pulled = server.pulled()
    assert pulled == server.counter("vllm:kvferry_tokens")
    computed = server.counter("vllm:prompt_tokens_by_source", 'source="local_compute"')
    return Prefilled(computed=computed, pulled=pulled)


def turn(servers: Servers, router: Program, chats: Sequence[Chat]) -> Prefilled:
    """Have the next turn of each conversation answered; return what prefill did."""
    before = prefilled(servers["prefill"])
    ask_each(router.address, servers.model, chats, ANSWER_TOKENS)
    return prefilled(servers["prefill"]) - before


def started_chats(servers: Servers, router: Program, first: int, shortest: int = 20) -> list[Chat]:
    """Return conversations that have had their first turn, half of them streamed."""
    each = [Chat(first + i, stream=i % 2 == 0) for i in range(CLIENTS)]
    for index, chat in enumerate(each):
        chat.say(shortest + 37 * index)
    assert turn(servers, router, each).pulled == 0
    return each


def tokens(chats: Sequence[Chat]) -> int:
    """Return the number of all tokens in the prompts of the last turn."""
    return sum(len(chat.asked[-1]) for chat in chats)


def refused(server: HttpServer) -> float:
    return server.counter("vllm:kvferry_refused_tickets", "")


def all_right(ordinary: Engine, chats: Sequence[Chat]) -> None:
    """See that every answer of every turn is what one engine answers to the same prompt."""
    prompts = [asked for each in chats for asked in each.asked]
    answers = [answer for each in chats for answer in each.answers]
    completions = ordinary.generate(*prompts, max_tokens=ANSWER_TOKENS)
    wrong = [
        (len(prompt), answer, completion.tokens)
        for prompt, answer, completion in zip(prompts, answers, completions, strict=True)
        if answer != list(completion.tokens)
    ]
    assert not wrong, f"{len(wrong)} of {len(prompts)}: {wrong[:2]}"


def test_later_turns_compute_only_what_is_new(
    servers: Servers, router: Program, ordinary: Engine
) -> None:
    chats = started_chats(servers, router, 0)
    for length in (40, 33, 64):
        for chat in chats:
            chat.say(length)
        seen = sum(chat.seen for chat in chats)
        did = turn(servers, router, chats)
        new = tokens(chats) - seen
        # The cache of an answer's last token is computed only if the engine went one step further.
        assert new <= did.computed <= new + CLIENTS
        assert did.pulled >= CLIENTS * (ANSWER_TOKENS - 1)
    assert refused(servers["prefill"]) == 0
    all_right(ordinary, chats)


def test_a_history_that_the_client_edits(
    servers: Servers, router: Program, ordinary: Engine
) -> None:
    """Prefill computes from the block with the change on, and counts such turns."""
    chats = started_chats(servers, router, 100)
    counter = "vllm:kvferry_edited_histories"
    before = servers["prefill"].counter(counter, "")
    edits = 0
    for edited in (None, 1, 0):
        for chat in chats:
            chat.say(80)
            if edited is not None:
                chat.edit(edited)
        edits += sum(each.edited is not None for each in chats)
        unchanged = sum(each.seen if edited is None else each.edited or 0 for each in chats)
        did = turn(servers, router, chats)
        changed = tokens(chats) - unchanged
        assert changed <= did.computed <= changed + CLIENTS * BLOCK_TOKENS
    assert servers["prefill"].counter(counter, "") - before == edits == 2 * CLIENTS
    assert refused(servers["prefill"]) == 0
    all_right(ordinary, chats)


def test_a_turn_that_comes_after_the_hold_has_ended(
    servers: Servers, router: Program, ordinary: Engine
) -> None:
    """Nothing is held any more, of this test or of those before. Prefill computes the answers."""
    chats = started_chats(servers, router, 200)
    nothing_left(servers)
    for chat in chats:
        chat.say(40)
    pulled = servers["prefill"].counter("vllm:kvferry_tokens", "")
    did = turn(servers, router, chats)
    assert servers["prefill"].log().count("cause stale") >= CLIENTS, servers["prefill"].log()
    assert servers["prefill"].counter("vllm:kvferry_tokens", "") == pulled
    assert did.computed >= CLIENTS * (ANSWER_TOKENS + 40)
    all_right(ordinary, chats)
