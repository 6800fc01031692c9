"""When pages may go back, whatever happens on either side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import PREFILL, Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import (
    eventually,
    hand_over,
    idle_blocks,
    pulled_by,
    texts,
)
from tests.faults.cells import Cell

pytestmark = pytest.mark.timeout(300)

LEASE = 1.0
FEW_BLOCKS = 40
"""Four prompts of 511 tokens write into all of them."""


@pytest.fixture(scope="module")
def hasty(start_engine: StartEngine) -> Engine:
    """Prefills, and holds pages for a second only, of which it has few."""
    return start_engine(
        "hasty",
        "kv_producer",
        extra={"kv_lease_duration": LEASE},
        num_gpu_blocks_override=FEW_BLOCKS,
    )


@pytest.fixture(scope="module")
def gated_engine(start_engine: StartEngine) -> Engine:
    return start_engine("gated", "kv_consumer")


@pytest.fixture
def gated(gated_engine: Engine, tmp_path: Path) -> Iterator[tuple[Engine, Path]]:
    """A decode engine whose reads have landed, but do not say so before the gate exists."""
    gate = tmp_path / "gate"
    gated_engine.run(probes.gate_reads, str(gate), False)
    yield gated_engine, gate
    gate.touch()


def test_lease_is_over(hasty: Engine, decode: Engine) -> None:
    """Pages that nobody reads come back, and their ticket is worth nothing any more."""
    free = idle_blocks(hasty)
    tickets = hasty.prefill(prompt(100), prompt(101))
    assert hasty.run(probes.free_blocks) < free
    eventually(lambda: hasty.run(probes.free_blocks) == free)
    completions = decode.generate(prompt(100), prompt(101), params=tickets)
    assert [c.finish_reason for c in completions] == ["error", "error"]
    assert "pages within the lease" in hasty.log()  # of both requests, in one line or in two


def test_pages_reused_before_a_late_read(reference: Engine, hasty: Engine, decode: Engine) -> None:
    """The fence: other prompts' pages are never taken for this one's."""
    free = idle_blocks(hasty)
    [late] = hasty.prefill(prompt(200, seed=1))
    eventually(lambda: hasty.run(probes.free_blocks) == free)
    others = [prompt(511, seed=seed) for seed in range(2, 6)]
    assert hasty.generate(*others, max_tokens=1)
    cell = Cell(side="consumer", fault="slow", stage="before the handshake", driver="vllm")
    [completion] = decode.generate(prompt(200, seed=1), params=late)
    assert completion.finish_reason == "error"
    cell.write("stale")
    assert hand_over(hasty, decode, prompt(200, seed=1))[0] == texts(reference, prompt(200, seed=1))


def test_pages_given_back_during_the_read(
    reference: Engine, hasty: Engine, gated: tuple[Engine, Path]
) -> None:
    """They stood when the read began, and not when it ended."""
    decode, gate = gated
    free = idle_blocks(hasty)
    cell = Cell(side="consumer", fault="slow", stage="reading", driver="vllm")
    [request] = decode.submit(prompt(150), params=hasty.prefill(prompt(150)))
    eventually(gate.with_suffix(".reached").exists)
    eventually(lambda: hasty.run(probes.free_blocks) == free)
    gate.touch()
    [completion] = decode.results([request])
    assert completion.finish_reason == "error"
    cell.write("stale")
    assert f"request {request}" in decode.log()
    assert hand_over(hasty, decode, prompt(150))[0] == texts(reference, prompt(150))


def test_abort_on_decode_before_its_first_step(prefill: Engine, decode: Engine) -> None:
    """The producer hears of it, long before the lease is over."""
    free = idle_blocks(prefill)
    [ticket] = prefill.prefill(prompt(120))
    cell = Cell(side="consumer", fault="aborted", stage="before the handshake", driver="vllm")
    with decode.paused():
        [request] = decode.submit(prompt(120), params=ticket)
        decode.abort(request)
    eventually(lambda: prefill.run(probes.free_blocks) == free)
    cell.write("released")
    assert decode.run(probes.statuses) == []


def test_abort_on_decode_during_the_load(
    reference: Engine, prefill: Engine, gated: tuple[Engine, Path]
) -> None:
    """Its blocks stay until no byte can land in them, then come back on both engines."""
    decode, gate = gated
    free = idle_blocks(prefill), idle_blocks(decode)
    [ticket] = prefill.prefill(prompt(120))
    [request] = decode.submit(prompt(120), params=ticket)
    eventually(gate.with_suffix(".reached").exists)
    cell = Cell(side="consumer", fault="aborted", stage="reading", driver="vllm")
    decode.abort(request)
    assert decode.run(probes.statuses) == ["FINISHED_ABORTED"]
    assert decode.run(probes.free_blocks) < free[1]
    gate.touch()
    eventually(lambda: decode.run(probes.statuses) == [])
    eventually(lambda: (prefill.run(probes.free_blocks), decode.run(probes.free_blocks)) == free)
    cell.write("released when quiet")
    assert hand_over(prefill, decode, prompt(120))[0] == texts(reference, prompt(120))


def test_abort_on_prefill(reference: Engine, decode: Engine, start_engine: StartEngine) -> None:
    """Before there is a ticket its blocks are free at once, and its slot serves again."""
    prefill = start_engine("chunked", "kv_producer", max_num_batched_tokens=64)
    free = idle_blocks(prefill)
    with prefill.paused():
        [unstarted] = prefill.submit(prompt(300), params=PREFILL, max_tokens=1)
        prefill.abort(unstarted)
        [begun] = prefill.submit(prompt(300), params=PREFILL, max_tokens=1)
        prefill.step(2)
        assert prefill.run(probes.free_blocks) < free
        cell = Cell(side="producer", fault="aborted", stage="computing", driver="vllm")
        prefill.abort(begun)
        assert prefill.run(probes.free_blocks) == free
        cell.write("released")
    assert hand_over(prefill, decode, prompt(300))[0] == texts(reference, prompt(300))


def test_abort_on_prefill_after_the_ticket(
    reference: Engine, prefill: Engine, decode: Engine
) -> None:
    """Too late: the pages are another engine's now."""
    [request] = prefill.submit(prompt(90), params=PREFILL, max_tokens=1)
    [completion] = prefill.results([request])
    cell = Cell(side="producer", fault="aborted", stage="after the ticket", driver="vllm")
    prefill.abort(request)
    [got] = decode.generate(prompt(90), params=completion.params)
    assert got.text == texts(reference, prompt(90))[0]
    cell.write("loaded")


def test_ticket_used_twice(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """The first to finish ends the hold; the second is told that it came too late."""
    free = idle_blocks(prefill)
    [ticket] = prefill.prefill(prompt(130))
    [first] = decode.generate(prompt(130), params=ticket)
    eventually(lambda: prefill.run(probes.free_blocks) == free)
    [second] = decode.generate(prompt(130), params=ticket)
    assert first.text == texts(reference, prompt(130))[0]
    assert second.finish_reason == "error"


def test_ticket_used_at_once_by_three(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """Two load while one is aborted, and then nothing is held."""
    free, before = idle_blocks(prefill), pulled_by(decode)
    one = prompt(130, seed=7)
    [ticket] = prefill.prefill(one)
    with decode.paused():
        requests = decode.submit(one, one, one, params=ticket)
        decode.abort(requests.pop(0))
    completions = decode.results(requests)
    assert [c.text for c in completions] == texts(reference, one) * len(requests)
    assert pulled_by(decode) - before == 130 * len(requests)
    eventually(lambda: prefill.run(probes.free_blocks) == free)
    assert decode.run(probes.statuses) == []


def test_producer_is_restarted(
    reference: Engine, decode: Engine, start_engine: StartEngine
) -> None:
    """Same engine id, same port, another life: an old ticket is refused, a new one works."""
    first = start_engine("restarted", "kv_producer", transfer={"engine_id": "restarted"})
    assert hand_over(first, decode, prompt(60))[0] == texts(reference, prompt(60))
    old, older = first.prefill(prompt(61), prompt(62))
    first.close()
    second = start_engine(
        "restarted",
        "kv_producer",
        transfer={"engine_id": "restarted"},
        extra={"side_channel_port": old["remote_port"]},
    )
    cell = Cell(side="producer", fault="restarted", stage="before the read", driver="vllm")
    for length, ticket in ((61, old), (62, older)):
        [completion] = decode.generate(prompt(length), params=ticket)
        assert completion.finish_reason == "error"
    cell.write("refused")
    assert "it was restarted since" in decode.log()
    assert hand_over(second, decode, prompt(61))[0] == texts(reference, prompt(61))


def test_a_consumer_that_is_killed_and_started_again(
    reference: Engine, prefill: Engine, hasty: Engine, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Pages that it was reading come back with their lease; its next start reads what still is."""
    free = idle_blocks(hasty)
    rest = idle_blocks(prefill)
    first = start_engine("again", "kv_consumer", transfer={"engine_id": "again"})
    gate = tmp_path / "gate"
    first.run(probes.gate_reads, str(gate), False)
    [short], [long] = hasty.prefill(prompt(83)), prefill.prefill(prompt(84))
    first.submit(prompt(83), params=short)
    eventually(gate.with_suffix(".reached").exists)
    first.submit(prompt(84), params=long)
    killed = Cell(side="consumer", fault="killed", stage="reading", driver="vllm")
    again = Cell(side="consumer", fault="restarted", stage="reading", driver="vllm")
    first.kill()
    eventually(lambda: hasty.run(probes.free_blocks) == free)
    killed.write("released by the lease")
    second = start_engine("again", "kv_consumer", transfer={"engine_id": "again"})
    [completion] = second.generate(prompt(84), params=long)
    assert completion.text == texts(reference, prompt(84))[0]
    again.write("loaded")
    eventually(lambda: prefill.run(probes.free_blocks) == rest)
    second.close()
