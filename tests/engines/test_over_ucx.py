"""The hand-over between real engines again, over the driver ucx: shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    check_turns,
)
from tests.engines.early import check_early
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import hand_over, pulled, texts

pytestmark = pytest.mark.timeout(600)

LENGTHS = (2, 5, 31, 32, 33, 65, 256, 511)
CHUNK = 64
# Where UCX has shared memory, it moves bytes by that, and connects and talks by tcp.
TRANSPORTS = {"memory": ["self", "sm", "tcp"], "tcp": ["self", "tcp"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Engines whose UCX moves bytes in one way only; each is started when it is first needed."""

    way: str
    start: StartEngine
    _started: dict[str, Engine] = field(default_factory=dict)

    def __call__(self, role: str, ranks: int = 1, chunk: int = 0, **extra: Any) -> Engine:
        name = "-".join(["ucx", self.way, role, str(ranks), str(chunk), *extra])
        chunks = {"max_num_batched_tokens": chunk} if chunk else {}
        if name not in self._started:
            options = {"transports": TRANSPORTS[self.way]}
            self._started[name] = self.start(
                name,
                f"kv_{role}",
                extra={"driver": "ucx", "driver_options": options, **extra},
                tensor_parallel_size=ranks,
                **chunks,
            )
        return self._started[name]

    def close(self) -> None:
        for engine in self._started.values():
            engine.close()


@pytest.fixture(scope="module", params=["memory"])
def engines(request: pytest.FixtureRequest, start_engine: StartEngine) -> Iterator[Engines]:
    engines = Engines(way=request.param, start=start_engine)
    yield engines
    engines.close()


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 1), (1, 2), (2, 1)])
def test_hand_over(
    reference: Engine, engines: Engines, prefill_ranks: int, decode_ranks: int
) -> None:
    source, target = engines("producer", prefill_ranks), engines("consumer", decode_ranks)
    prompts = [prompt(length, seed=10 * prefill_ranks + decode_ranks) for length in LENGTHS]
    rest = at_rest(source, target)
    got, counters = hand_over(source, target, *prompts)
    assert got == texts(reference, *prompts)
    assert pulled(counters) == counters["vllm:kvferry_tokens"] == sum(LENGTHS)
    come_to(rest, source, target)


def test_swapped_caches(reference: Engine, engines: Engines) -> None:
    """The control: from Y's cache comes Y's text, so the bytes are those that UCX moved."""
    source, credulous = engines("producer"), engines("consumer", verify_prompt=False)
    x, y = prompt(200, seed=10), prompt(200, seed=11)
    # What the decode engine computes itself, the last token, is the same in both.
    y[-1] = x[-1]
    [completion] = credulous.generate(x, params=source.prefill(y))
    assert completion.text == texts(reference, y)[0] != texts(reference, x)[0]


def test_early(reference: Engine, engines: Engines) -> None:
    """In chunks, with one preemption."""
    chunked = engines("producer", chunk=CHUNK)
    check_early(reference, chunked, engines("consumer"), CHUNK)


def test_conversation(reference: Engine, start_engine: StartEngine) -> None:
    """Prefill pulls the turns before from decode, answers included."""
    extra = {"driver": "ucx"} | TWO_WAY
    prefill, decode = (
        start_engine(f"ucx-{name}", ROLE, extra=extra, transfer=RECOMPUTE)
        for name in ("asking", "answering")
    )
    check_turns(reference, Conversation(prefill=prefill, decode=decode))
    prefill.close()
    decode.close()
