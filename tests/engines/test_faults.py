"""Faults between real engines that no other module here is about."""

from __future__ import annotations

import os
import signal
from contextlib import closing

import pytest

from examples.tiny_llama import prompt
from tests.engines import killing
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import hand_over, texts
from tests.faults.cable import Channel, pester
from tests.faults.cells import Cell

pytestmark = pytest.mark.timeout(300)

HANDSHAKE = 2.0


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
