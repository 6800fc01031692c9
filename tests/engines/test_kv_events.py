"""The KV events of engines that hand over, by which routers learn which engine caches what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import Engine
from tests.engines.fleet import Fleet, fleet
from tests.engines.steps import check_refused
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

BLOCKS = 48
"""So few that some prompts after each other evict the first ones."""

MARKS = iter([prompt(32, seed=seed) for seed in range(100, 120)])
"""Prompts of one block. The event of one comes after all that was published before."""
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

Events = list[dict[str, Any]]


class Publisher:
    """An engine that publishes its KV events, and what was read of them."""

    def __init__(self, engines: Fleet, folder: Path, name: str, role: str | None) -> None:
        address = f"ipc://{folder}/{name}"
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events |= {"endpoint": address, "replay_endpoint": f"{address}.replay"}
        self.engine: Engine = engines.launch(
            name, role, enable_prefix_caching=True, kv_events_config=events
        )
        self._replay, self._read = f"{address}.replay", 0

    def events(self, mark: list[int]) -> Events:
        """Return the events since the last call, in order, without that of the mark."""
        self.engine.generate(mark, max_tokens=1)
        events: Events = []

        def is_marked() -> bool:
            self._collect(events)
            return bool(events) and events[-1].get("token_ids") == mark

        eventually(is_marked)
        return events[:-1]

    def _collect(self, events: Events) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(self._replay)
            socket.send_multipart([b"", self._read.to_bytes(8, "big")])
            while payload := (parts := socket.recv_multipart())[-1]:
                self._read = int.from_bytes(parts[-2], "big") + 1
                events += msgspec.msgpack.decode(payload)[1]


Publishers = dict[str, Publisher]


@pytest.fixture(scope="module")
def publishers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publishers]:
    """Engines of the same size: an ordinary one, and two that hand over."""
    folder = tmp_path_factory.mktemp("events")
    roles = {"ordinary": None, "prefill": "kv_producer", "decode": "kv_consumer"}
    with fleet(checkpoint, folder, num_gpu_blocks_override=BLOCKS) as engines:
        found = {name: Publisher(engines, folder, name, role) for name, role in roles.items()}
        engines.wait_started()
        yield found


def blocks(events: Events, kind: str) -> list[Any]:
    """The blocks that were cached, or are no longer, in order."""
    return [each for event in events if event["type"] == kind for each in event["block_hashes"]]


@pytest.mark.parametrize(("name", "answered"), [("decode", 34), ("prefill", 1)])
def test_an_engine_publishes_what_one_publishes_that_computes_as_much(
    publishers: Publishers, name: str, answered: int
) -> None:
    """Hashes, parents, token ids, order; and what is evicted, when. That a hold ends is no event:
    its blocks stay cached until they are given to others."""
    engines = {name: each.engine for name, each in publishers.items()}
    both, mark = (publishers[name], publishers["ordinary"]), next(MARKS)
    for each in both:
        each.events(mark)
        assert each.engine.run(clear)
    for asked in PROMPTS:
        [ticket] = engines["prefill"].prefill(asked)
        [expected] = engines["ordinary"].generate(asked, max_tokens=answered)
        [got] = engines["decode"].generate(asked, params=ticket, max_tokens=34)
        assert got.tokens[:answered] == expected.tokens
        eventually(lambda: engines["prefill"].run(probes.statuses) == [])
    mark = next(MARKS)
    events, ordinary = (each.events(mark) for each in both)
    assert events == ordinary
    assert len(blocks(events, "BlockRemoved")) > 20


def test_what_did_not_arrive_is_not_published(publishers: Publishers) -> None:
    """A ticket is good once: the second load reads the pages, and then finds the hold ended."""
    prefill, decode = publishers["prefill"], publishers["decode"]
    asked = prompt(200, seed=30)
    [ticket] = prefill.engine.prefill(asked)
    decode.engine.generate(asked, params=ticket)
    eventually(lambda: prefill.engine.run(probes.statuses) == [])
    assert decode.engine.run(clear)
    assert blocks(decode.events(next(MARKS)), "BlockStored")
    check_refused(decode.engine, asked, ticket)
    assert not blocks(decode.events(next(MARKS)), "BlockStored")


def clear(engine: Any) -> bool:
    """Empty the cache (`engines.Engine.run`)."""
    cleared: bool = engine.reset_prefix_cache()
    return cleared
