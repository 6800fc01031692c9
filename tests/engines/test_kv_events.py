"""The KV events of engines that hand over, by which routers learn which engine caches what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually, hand_over, pulled, texts

pytestmark = pytest.mark.timeout(300)

BLOCK = 32
BLOCKS = 48
"""So few that some prompts after each other evict the first ones."""

MARKS = [prompt(BLOCK, seed=seed) for seed in range(100, 110)]
START, COMMON = prompt(100, seed=1), prompt(70, seed=2)
PROMPTS = [
    prompt(5),
    prompt(32),
    prompt(33),
    prompt(300),
    START,
    [*START, *prompt(60, seed=3)],
    [*COMMON, *prompt(28, seed=4)],
    [*COMMON, *prompt(29, seed=5)],
    prompt(300),
    *(prompt(500, seed=seed) for seed in range(6, 9)),
    prompt(300),
]
"""Of one block and of many, aligned and not; with a prefix that is cached; evicted and repeated."""


@dataclass(kw_only=True)
class Publisher:
    """An engine that publishes its KV events, and what was read of them."""

    engine: Engine
    replay: str
    _read: int = 0

    def events(self, mark: list[int]) -> list[dict[str, Any]]:
        """Return the events since the last call, in order.

        Args:
            mark: A prompt of one block. Its event comes after all that was published before, and is
                left out.
        """
        self.engine.generate(mark, max_tokens=1)
        events: list[dict[str, Any]] = []
        eventually(lambda: any(_stores(event, mark) for event in self._collect(events)))
        end = next(i for i, event in enumerate(events) if _stores(event, mark))
        return events[:end]

    def _collect(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add the events that were published since, and return all."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(self.replay)
            socket.send_multipart([b"", self._read.to_bytes(8, "big")])
            while payload := (parts := socket.recv_multipart())[-1]:
                self._read = int.from_bytes(parts[-2], "big") + 1
                events += msgspec.msgpack.decode(payload)[1]
        return events


def _stores(event: dict[str, Any], tokens: list[int]) -> bool:
    return event.get("token_ids") == tokens


@dataclass(frozen=True, kw_only=True)
class Publishers:
    """Engines of the same size: an ordinary one, and two that hand over."""

    ordinary: Publisher
    prefill: Publisher
    decode: Publisher


Start = Callable[..., Publisher]
"""Starts an engine that publishes, by its name, its role and its options."""


@pytest.fixture(scope="module")
def start_publisher(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("events")

    def start(name: str, role: str | None = None, **options: Any) -> Publisher:
        replay = f"ipc://{folder}/{name}.replay"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/{name}",
            "replay_endpoint": replay,
        }
        caching = {"enable_prefix_caching": True, "kv_events_config": events}
        return Publisher(engine=start_engine(name, role, **caching, **options), replay=replay)

    return start


@pytest.fixture(scope="module")
def publishers(start_publisher: Start) -> Publishers:
    return Publishers(
        ordinary=start_publisher("ordinary", num_gpu_blocks_override=BLOCKS),
        prefill=start_publisher("prefill", "kv_producer", num_gpu_blocks_override=BLOCKS),
        decode=start_publisher("decode", "kv_consumer", num_gpu_blocks_override=BLOCKS),
    )


def removed(events: list[dict[str, Any]]) -> set[Any]:
    """The blocks that are cached no longer."""
    return {each for e in events if e["type"] == "BlockRemoved" for each in e["block_hashes"]}


def stored(events: list[dict[str, Any]]) -> set[Any]:
    """The blocks that were cached."""
    return {each for e in events if e["type"] == "BlockStored" for each in e["block_hashes"]}


def clear(engine: Any) -> None:
    """Empty the cache (`engines.Engine.run`)."""
    assert engine.reset_prefix_cache()


def free(publisher: Publisher) -> int:
    blocks: int = publisher.engine.run(probes.free_blocks)
    return blocks


def test_decode_publishes_what_an_engine_publishes_that_computes(publishers: Publishers) -> None:
    """Hashes, parents, token ids, order; and what is evicted, when."""
    decode, ordinary = publishers.decode, publishers.ordinary
    whole = free(publishers.prefill)
    for each in PROMPTS:
        got, counted = hand_over(publishers.prefill.engine, decode.engine, each, max_tokens=34)
        assert got == texts(ordinary.engine, each, max_tokens=34)
        assert pulled(counted) > 0
        eventually(lambda: free(publishers.prefill) == whole)
    events = decode.events(MARKS[0])
    assert events == ordinary.events(MARKS[0])
    assert len(removed(events)) > 20


def test_prefill_publishes_what_an_engine_publishes_that_answers_itself(
    publishers: Publishers,
) -> None:
    """That a hold ends is no event: its blocks stay cached until they are given to others."""
    prefill, ordinary = publishers.prefill, publishers.ordinary
    for each in (prefill, ordinary):
        each.events(MARKS[1])
        each.engine.run(clear)
    whole = free(prefill)
    for tokens in PROMPTS:
        hand_over(prefill.engine, publishers.decode.engine, tokens)
        eventually(lambda: free(prefill) == whole)
        texts(ordinary.engine, tokens, max_tokens=1)
    events = prefill.events(MARKS[2])
    assert events == ordinary.events(MARKS[2])
    assert len(removed(events)) > 20


def test_held_blocks_are_not_evicted(publishers: Publishers) -> None:
    prefill = publishers.prefill
    whole = free(prefill)
    [ticket] = prefill.engine.prefill(prompt(300, seed=20))
    held = stored(prefill.events(MARKS[3]))
    assert len(held) == 300 // BLOCK
    fillers = [prompt(700, seed=seed) for seed in range(21, 25)]
    texts(prefill.engine, *fillers, max_tokens=1)
    assert not held & removed(prefill.events(MARKS[4]))
    publishers.decode.engine.generate(prompt(300, seed=20), params=ticket)
    eventually(lambda: free(prefill) == whole)
    assert not prefill.events(MARKS[5])
    texts(prefill.engine, *(prompt(700, seed=seed) for seed in range(25, 29)), max_tokens=1)
    assert held <= removed(prefill.events(MARKS[6]))


def test_what_did_not_arrive_is_not_published(publishers: Publishers) -> None:
    """A ticket is good once: the second load reads the pages, and then finds the hold ended."""
    prefill, decode = publishers.prefill, publishers.decode
    whole = free(prefill)
    asked = prompt(200, seed=30)
    [ticket] = prefill.engine.prefill(asked)
    decode.engine.generate(asked, params=ticket)
    eventually(lambda: free(prefill) == whole)
    decode.engine.run(clear)
    assert stored(decode.events(MARKS[7]))
    [completion] = decode.engine.generate(asked, params=ticket)
    assert completion.finish_reason == "error"
    assert not stored(decode.events(MARKS[8]))
