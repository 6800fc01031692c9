"""Ways in which a request with a ticket ends without a load: "done" is said once, or never.

Those in which nothing but the scheduler half's consumer has a part are in its model. Needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.steps import eventually
from tests.integrations.vllm import without_vllm
from tests.integrations.vllm.halves import (
    PREFILL,
    SERVING,
    Follower,
    blocks,
    full,
    producer,
    request,
)
from tests.integrations.vllm.test_adapter_files import content, write
from tests.integrations.vllm.test_early_half import DECODE, Prefilling
from tests.integrations.vllm.test_scheduler_hooks import IDLE, configured

TOKENS = 40


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    names = ("scheduler", "metadata", "adapter_loads", "engine_facts")
    with without_vllm.modules(*names) as found:
        yield SimpleNamespace(**dict(zip(names, found, strict=True)))


class Decode:
    """The scheduler half of an engine that decodes, and for whom its workers say done, or load."""

    def __init__(self, vllm: Any, patch: pytest.MonkeyPatch, path: str) -> None:
        self._vllm, self._path = vllm, path
        self._follower = Follower()
        patch.setattr(vllm.scheduler, "RoomFollower", lambda _: self._follower)
        patch.setattr(vllm.engine_facts, "cache_groups", lambda *_: full())
        self.done: list[str] = []
        self.loads: list[str] = []
        self._alive: set[int] = set()
        caches = SimpleNamespace(num_blocks=100)
        self.half: Any = vllm.scheduler.FerryScheduler(configured(), caches)

    def lora(self) -> Any:
        return SimpleNamespace(lora_name="adapter", lora_int_id=1, lora_path=self._path)

    def ticket(self, *, lora: bool = False) -> dict[str, Any]:
        """What an engine that prefills sends, with the adapter's content there."""
        adapter = content(self._path) if lora else None
        made = producer(adapter_content=lambda _: adapter)
        each = request(TOKENS, PREFILL)
        each.lora_request = self.lora() if lora else None
        made.take_on(each)
        params = made.request_finished(each, [[1, 2, 3]], SERVING)
        assert params is not None
        return params

    def arrive(
        self,
        params: dict[str, Any] | None = None,
        *,
        lora: bool = False,
        name: str = "r",
        tokens: int = TOKENS,
    ) -> Any:
        """Let a request come, by default with a ticket for its prompt."""
        each = request(tokens, self.ticket(lora=lora) if params is None else params, name=name)
        each.lora_request = self.lora() if lora else None
        each.all_token_ids = each.prompt_token_ids
        self._alive.add(id(each))
        self.half.on_new_request(each)
        self.half.get_num_new_matched_tokens(each, 0)
        return each

    def begin(self, each: Any, external: int = 0) -> None:
        """Give a request blocks, to load some tokens into, or none."""
        self.half.update_state_after_alloc(each, blocks(21, 22, 23), external)

    def end(self, each: Any) -> None:
        each.status = SimpleNamespace(name="FINISHED_ABORTED")
        self._alive.discard(id(each))
        assert self.half.request_finished_all_groups(each, [[]]) == (False, None)

    def hear_ticket(self, *, lora: bool = False) -> None:
        """Prefill finishes the request of the room."""
        adapter = content(self._path) if lora else None
        there = Prefilling(tokens=TOKENS, adapter_content=lambda _: adapter)
        there.request.lora_request = self.lora() if lora else None
        there.place(11, 12, 13)
        self._follower.hear(there.finish().news())

    def step(self) -> None:
        """Run a step, as vLLM does while there are requests, or the half asks for steps."""
        assert self.half.has_pending_push_work() or self._alive
        step = self.half.build_connector_meta(IDLE)
        adapters = self._vllm.adapter_loads.AdapterReport(step=step.asks_adapters)
        report = self._vllm.metadata.RankReport(adapters=adapters)
        said = {"finished_sending": None, "finished_recving": None, "failed_recving": None}
        self.half.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report, **said))
        self.done += [load.request for load in step.loads if not (load.reads or load.shared)]
        self.loads += [load.request for load in step.loads if load.reads]

    def hash_adapter(self) -> None:
        """Let the adapter be hashed, and the workers answer which one they have."""
        self.step()
        eventually(lambda: not self.half._adapters._is_hashing(self._path))

    def know_adapter(self) -> None:
        """Let the content of the adapter become known, and run the next step."""
        self.hash_adapter()
        self.step()


@pytest.fixture
def decode(vllm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Decode]:
    made = Decode(vllm, monkeypatch, write(tmp_path / "adapter"))
    yield made
    made.half.shutdown()


def lora_ends_while_hashed(decode: Decode) -> None:
    decode.end(decode.arrive(lora=True))


def lora_ends_when_hashed(decode: Decode) -> None:
    each = decode.arrive(lora=True)
    decode.know_adapter()
    decode.end(each)


def lora_begins_while_hashed(decode: Decode) -> None:
    """It asks for ``prompt_logprobs``, and vLLM does not let it wait."""
    each = decode.arrive(lora=True)
    decode.begin(each)
    decode.know_adapter()
    decode.end(each)


def another_sample_of_lora_is_over_first(decode: Decode) -> None:
    """Both have one hold, which must stay until the second is over, too."""
    params = decode.ticket(lora=True)
    first, second = (decode.arrive(params, lora=True, name=f"{index}_r") for index in range(2))
    decode.hash_adapter()
    assert decode.half.get_num_new_matched_tokens(first, 0) == (TOKENS, True)
    decode.begin(first)
    decode.end(first)
    decode.step()
    assert decode.done == []
    decode.end(second)


def lora_in_a_room_ends_when_hashed(decode: Decode) -> None:
    each = decode.arrive(DECODE, lora=True)
    decode.know_adapter()
    decode.end(each)
    decode.hear_ticket(lora=True)
    decode.step()


def lora_is_refused(decode: Decode) -> None:
    """Its adapter has other files here, so nothing says that the ticket is its own."""
    params = decode.ticket(lora=True)
    write(Path(decode._path), b"other weights")
    each = decode.arrive(params, lora=True)
    decode.know_adapter()
    decode.end(each)


def is_refused_by_vllm(decode: Decode) -> None:
    """vLLM hands on a stand-in without the prompt, so the ticket cannot be checked."""
    each = request(0, decode.ticket())
    each.abort_immediately = True
    decode.half.on_new_request(each)
    decode.end(each)


def id_is_used_again_while_lora_is_hashed(decode: Decode) -> None:
    """The second request has the id; the first one's ticket is left to the lease."""
    decode.end(decode.arrive(lora=True))
    each = decode.arrive(lora=True)
    decode.know_adapter()
    decode.begin(each, TOKENS)
    decode.step()
    assert decode.loads.pop() == "r"
    decode.end(each)


@pytest.mark.parametrize(
    ("way", "count"),
    [
        (lora_ends_when_hashed, 1),
        (another_sample_of_lora_is_over_first, 1),
        (lora_ends_while_hashed, 0),
        (lora_begins_while_hashed, 0),
        (lora_in_a_room_ends_when_hashed, 0),
        (lora_is_refused, 0),
        (is_refused_by_vllm, 0),
        (id_is_used_again_while_lora_is_hashed, 0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_request_that_loads_nothing(
    decode: Decode, way: Callable[[Decode], None], count: int
) -> None:
    way(decode)
    while decode.half._consumer.pending:
        decode.step()
    assert (len(decode.done), decode.loads) == (count, [])
    assert not decode.half._adapters._followers
