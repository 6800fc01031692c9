"""Faults of a producer, and of the way to it: what decode makes of them, and how it goes on."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines import ranks
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.fleet import fleet
from tests.engines.steps import (
    check_decoded,
    check_hand_over,
    check_refused,
    counted,
    pulled_by,
    texts,
)
from tests.faults.cable import Channel, pester

pytestmark = pytest.mark.timeout(600)

FOR_LONG = {"kv_lease_duration": 600.0}
"""No test lasts as long: a load ends only because the death is known."""
DEATHS = [
    ("loopback", "fail"),
    ("loopback", "recompute"),
    ("staged", "fail"),
    ("nixl", "recompute"),
    ("ucx", "fail"),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("nixl", "fail"), ("ucx", "recompute"))
    ),
]


@pytest.mark.parametrize(("way", "policy"), DEATHS)
def test_a_producer_that_is_killed_while_it_is_read(
    reference: Engine, checkpoint: Path, tmp_path: Path, way: str, policy: str
) -> None:
    """Its requests fail, or are computed here; another producer's, read meanwhile, does not."""
    staged = way == "staged"
    extra = {"staging": True} if staged else {"driver": way}
    ranks_of_failing = 2 if policy == "recompute" else 1
    with fleet(checkpoint, tmp_path) as engines:
        healthy = engines.launch("healthy", "kv_producer", extra)
        failing = engines.launch(
            "failing", "kv_producer", FOR_LONG | extra, tensor_parallel_size=ranks_of_failing
        )
        decode = engines.launch("decode", "kv_consumer", extra, {"kv_load_failure_policy": policy})
        engines.wait_started()
        for producer in (failing, healthy):
            check_hand_over(reference, producer, decode, prompt(60))
        lost, kept, late = prompt(300, seed=1), prompt(90, seed=1), prompt(61, seed=1)
        before = pulled_by(decode)
        tickets = [*failing.prefill(lost, late), *healthy.prefill(kept)]
        victims = failing.run(ranks.pids)
        decode.run(ranks.disturb_reads, "deadly", str(tmp_path / "gate"), None, victims)
        answers = decode.generate(lost, kept, params=[tickets[0], tickets[2]])
        failing.kill()
        answers += decode.generate(late, params=tickets[1])
        expected = texts(reference, lost, kept, late)
        if policy == "fail":
            assert [answer.finish_reason for answer in answers] == ["error", "length", "error"]
            expected = ["", expected[1], ""]
        assert [answer.text for answer in answers] == expected
        assert pulled_by(decode) - before == len(kept)
        assert counted(decode, "vllm:kvferry_failed_loads") == 2
        check_hand_over(reference, healthy, decode, *(prompt(each, seed=2) for each in (33, 200)))


def test_a_producer_that_is_killed_between_two_reads(
    reference: Engine, start_engine: StartEngine, prefill: Engine, decode: Engine
) -> None:
    """What came to decode before the death fails, and so does what comes later."""
    failing = start_engine("failing", "kv_producer", extra=FOR_LONG)
    check_hand_over(reference, failing, decode, prompt(60))
    tickets = failing.prefill(prompt(61), prompt(62))
    failing.kill()
    for length, ticket in zip((61, 62), tickets, strict=True):
        check_refused(decode, prompt(length), ticket)
    check_hand_over(reference, prefill, decode, prompt(60))


@pytest.fixture(scope="module")
def impatient(start_engine: StartEngine) -> Engine:
    """Decodes, waits for no side channel for long, and asks none but at this address."""
    extra = {"handshake_timeout": 2.0, "allowed_peers": ["127.0.0.1"]}
    return start_engine("impatient", "kv_consumer", extra=extra)


def test_a_producer_that_is_stopped(
    reference: Engine, impatient: Engine, start_engine: StartEngine
) -> None:
    """Its side channel takes the connection, and nobody answers."""
    prefill = start_engine("stopped", "kv_producer")
    [ticket] = prefill.prefill(prompt(80))
    pids = prefill.run(ranks.pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    fails_alone(reference, impatient, ticket)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    check_hand_over(reference, prefill, impatient, prompt(80))


def test_a_producer_that_cannot_be_reached(
    reference: Engine, impatient: Engine, start_engine: StartEngine
) -> None:
    """The ticket is good again when the way is, which leads by the router's address: the producer's
    own is one that the consumer may not ask."""
    prefill = start_engine("elsewhere", "kv_producer", extra={"side_channel_host": "127.0.0.2"})
    [ticket] = prefill.prefill(prompt(80))
    with closing(Channel(ticket["remote_port"], ticket["remote_host"])) as channel:
        behind = ticket | {"remote_host": "127.0.0.1", "remote_port": channel.port}
        channel.cut()
        fails_alone(reference, impatient, behind)
        channel.mend()
        check_decoded(reference, impatient, prompt(80), behind)


def fails_alone(reference: Engine, decode: Engine, ticket: dict[str, object]) -> None:
    """The ticket's prompt of 80 tokens fails, and a request without a ticket does not."""
    failed, other = decode.generate(prompt(80), prompt(85), params=[ticket, None])
    assert failed.finish_reason == "error"
    assert other.text == texts(reference, prompt(85))[0]


def test_strangers_at_a_side_channel(reference: Engine, prefill: Engine, decode: Engine) -> None:
    [ticket] = prefill.prefill(prompt(82))
    pester(ticket["remote_port"])
    check_decoded(reference, decode, prompt(82), ticket)
    check_hand_over(reference, prefill, decode, prompt(82))
