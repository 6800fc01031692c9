"""Faults between real engines that no other module here is about."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines import killing, probes
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually, hand_over, idle_blocks, texts
from tests.faults.cable import Channel, pester
from tests.faults.cells import Cell

pytestmark = pytest.mark.timeout(300)

HANDSHAKE = 2.0
LEASE = 1.0


@pytest.fixture(scope="module")
def impatient(start_engine: StartEngine) -> Engine:
    """Decodes, waits for no side channel for long, and asks none but at this address."""
    extra = {"handshake_timeout": HANDSHAKE, "allowed_peers": ["127.0.0.1"]}
    return start_engine("impatient", "kv_consumer", extra=extra)


def test_a_producer_that_is_stopped(
    reference: Engine, impatient: Engine, start_engine: StartEngine
) -> None:
    """Its side channel takes the connection, and nobody answers."""
    prefill = start_engine("stopped", "kv_producer")
    [ticket] = prefill.prefill(prompt(80))
    pids = prefill.run(killing.victim).pids
    cell = Cell(side="producer", fault="stopped", stage="before the handshake", driver="vllm")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    failed, other = impatient.generate(prompt(80), prompt(85), params=[ticket, None])
    assert failed.finish_reason == "error"
    assert other.text == texts(reference, prompt(85))[0]
    cell.write("failed alone")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert hand_over(prefill, impatient, prompt(80))[0] == texts(reference, prompt(80))


def test_a_producer_that_cannot_be_reached(
    reference: Engine, impatient: Engine, start_engine: StartEngine
) -> None:
    """The ticket is good again when the way is, which leads by the router's address: the producer's
    own is one that the consumer may not ask."""
    prefill = start_engine("elsewhere", "kv_producer", extra={"side_channel_host": "127.0.0.2"})
    [ticket] = prefill.prefill(prompt(81))
    cell = Cell(side="producer", fault="cut off", stage="before the handshake", driver="vllm")
    with closing(Channel(ticket["remote_port"], ticket["remote_host"])) as channel:
        behind = ticket | {"remote_host": "127.0.0.1", "remote_port": channel.port}
        channel.cut()
        failed, other = impatient.generate(prompt(81), prompt(86), params=[behind, None])
        assert failed.finish_reason == "error"
        assert other.text == texts(reference, prompt(86))[0]
        cell.write("failed alone")
        channel.mend()
        [completion] = impatient.generate(prompt(81), params=behind)
        assert completion.text == texts(reference, prompt(81))[0]


def test_strangers_at_a_side_channel(reference: Engine, prefill: Engine, decode: Engine) -> None:
    [ticket] = prefill.prefill(prompt(82))
    cell = Cell(side="producer", fault="pestered", stage="before the read", driver="vllm")
    pester(ticket["remote_port"])
    [completion] = decode.generate(prompt(82), params=ticket)
    assert completion.text == texts(reference, prompt(82))[0]
    cell.write("loaded")
    assert hand_over(prefill, decode, prompt(82))[0] == texts(reference, prompt(82))


def test_a_consumer_that_is_killed_and_started_again(
    reference: Engine, prefill: Engine, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Pages that it was reading come back with their lease; its next start reads what still is."""
    hasty = start_engine("hasty", "kv_producer", extra={"kv_lease_duration": LEASE})
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
