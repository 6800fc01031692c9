"""A producer is killed: what decode knows of it, when, and how it goes on.

``-o log_cli=true -o log_cli_level=INFO`` shows the seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines import killing, probes
from tests.engines.engines import Engine
from tests.engines.fleet import fleet
from tests.engines.ranks import at_rest, come_to, holds
from tests.engines.steps import eventually, hand_over, pulled, texts
from tests.faults.cells import Cell

pytestmark = pytest.mark.timeout(600)

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""Until then a load would end by itself; a death has to be known long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Engines over one driver."""

    driver: str  # its name
    healthy: Engine  # a producer that lives on
    # producers that do not, by who reads from them when they die, or ``idle``
    failing: dict[str, Engine]
    decode: dict[str, Engine]  # consumers, by their ``kv_load_failure_policy``


@contextmanager
def started(checkpoint: Path, folder: Path, driver: str, *deaths: str) -> Iterator[World]:
    """Engines over a driver, which start at the same time; ``deaths`` are keys of ``failing``."""
    extra = {"driver": driver}
    with fleet(checkpoint, folder) as engines:
        found = World(
            driver=driver,
            healthy=engines.launch("healthy", "kv_producer", extra),
            failing={
                death: engines.launch(
                    f"failing-{death}",
                    "kv_producer",
                    extra,
                    tensor_parallel_size=2 if death == "recompute" else 1,
                )
                for death in deaths
            },
            decode={
                policy: engines.launch(
                    policy, "kv_consumer", extra, {"kv_load_failure_policy": policy}
                )
                for policy in deaths
                if policy != "idle"
            },
        )
        engines.wait_started()
        yield found


@pytest.fixture(scope="module")
def world(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("killed")
    with started(checkpoint, folder, "loopback", "fail", "recompute", "idle") as found:
        yield found


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_in_the_middle_of_a_read(reference: Engine, world: World, policy: str) -> None:
    check_in_the_middle_of_a_read(reference, world, policy)


@pytest.mark.parametrize(("driver", "policy"), [("nixl", "recompute"), ("ucx", "fail")])
def test_in_the_middle_of_a_read_over(
    reference: Engine, checkpoint: Path, tmp_path: Path, driver: str, policy: str
) -> None:
    with started(checkpoint, tmp_path, driver, policy) as world:
        check_in_the_middle_of_a_read(reference, world, policy)


def check_in_the_middle_of_a_read(reference: Engine, world: World, policy: str) -> None:
    """Its request fails, or is computed here; another producer's, read meanwhile, does not."""
    where = "vllm" if world.driver == "loopback" else f"vllm over {world.driver}"
    fault = "killed" if policy == "fail" else "killed, and decode recomputes"
    cell = Cell(side="producer", fault=fault, stage="reading", driver=where)
    healthy, failing, decode = world.healthy, world.failing[policy], world.decode[policy]
    lost, kept, late = prompt(300, seed=1), prompt(90, seed=1), prompt(61, seed=1)
    assert hand_over(healthy, decode, prompt(60))[0] == texts(reference, prompt(60))
    eventually(lambda: not any(healthy.run(holds)))
    rest = at_rest(healthy, decode)
    before = decode.run(probes.metrics)
    tickets = failing.prefill(lost, late)
    decode.run(killing.kill_in_the_middle, failing.run(killing.victim))
    answers = decode.generate(lost, kept, params=[tickets[0], *healthy.prefill(kept)])
    failing.kill()
    course = decode.run(killing.course)
    logger.info(
        "%s, %s: known after %.3f s, over after %.3f s: %s",
        world.driver,
        policy,
        course.known,
        course.over,
        course.error,
    )
    # It does not wait for the end of a lease.
    assert 0 < course.known <= course.over < LEASE_SECONDS
    answers += decode.generate(late, params=tickets[1])
    if policy == "fail":
        assert [answer.finish_reason for answer in answers] == ["error", "length", "error"]
        assert answers[1].text == texts(reference, kept)[0]
    else:
        assert [answer.text for answer in answers] == texts(reference, lost, kept, late)
    after = decode.run(probes.metrics)
    assert pulled(after) - pulled(before) == len(kept)
    assert after["vllm:kvferry_failed_loads"] == 2
    come_to(rest, healthy, decode)
    eventually(lambda: decode.run(killing.course).connections == 0)
    assert decode.run(killing.course).healthy
    cell.write("failed alone" if policy == "fail" else "recomputed", course.over)
    goes_on(reference, healthy, decode)


def test_between_two_reads(reference: Engine, world: World) -> None:
    """What came to decode before the death fails, and so does what comes later."""
    healthy, failing, decode = world.healthy, world.failing["idle"], world.decode["fail"]
    assert hand_over(failing, decode, prompt(60))[0] == texts(reference, prompt(60))
    eventually(lambda: not any(healthy.run(holds)))
    rest = at_rest(healthy, decode)
    tickets = failing.prefill(prompt(61), prompt(62))
    cell = Cell(side="producer", fault="killed", stage="before the read", driver="vllm")
    failing.kill()
    for length, ticket in zip((61, 62), tickets, strict=True):
        [completion] = decode.generate(prompt(length), params=ticket)
        assert completion.finish_reason == "error"
    cell.write("failed alone")
    come_to(rest, healthy, decode)
    goes_on(reference, healthy, decode)


def goes_on(reference: Engine, healthy: Engine, decode: Engine) -> None:
    """Decode serves what another producer has prefilled, all of whose tokens it pulls."""
    given = [prompt(length, seed=2) for length in (33, 200)]
    got, counters = hand_over(healthy, decode, *given)
    assert got == texts(reference, *given)
    assert pulled(counters) == counters["vllm:kvferry_tokens"] == sum(map(len, given))
