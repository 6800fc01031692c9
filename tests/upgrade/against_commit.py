"""Hand over between engines of an older commit and of this tree: ``make upgrade FROM=<commit>``.

Each side runs its own code in a process of its own, in this environment. Promised is that pages go
from either engine to the other, with every kind of ticket that is made.
``pytest tests/upgrade/against_commit.py -k 'ucx and not vllm'`` chooses some of it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import Engine
from tests.engines.fleet import DOES_BOTH, fleet
from tests.engines.steps import check_decoded, pulled_by, texts
from tests.upgrade.sides import Way, check_tickets, two_sides
from tests.upgrade.trees import Tree, TreeError, tree
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)

WAYS = {
    "loopback": Way(driver="loopback"),
    "loopback-keys": Way(driver="loopback", encrypted=True),
    "ucx": Way(driver="ucx"),
    "ucx-tcp": Way(driver="ucx", options={"transports": ["self", "tcp"]}),
    "nixl": Way(driver="nixl"),
}
DRIVERS = ("loopback", "ucx", "nixl")
SHORT_LEASE = 9.0
WAIT_SECONDS = 12.0
"""Longer than a short lease."""
SETTLE_SECONDS = 1.0
"""Seconds by which a consumer's first sign of life may be later than its ticket."""
LENGTHS = (5, 31, 32, 33, 100, 256, 300)

Trees = tuple[Tree, Tree]


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    folder = tmp_path_factory.mktemp("trees")
    try:
        old = tree("old", folder / "old", os.environ["KVFERRY_UPGRADE_FROM"])
    except (KeyError, TreeError) as error:
        pytest.exit(f"make upgrade FROM=<commit>: {error}", 2)
    return old, tree("new", folder / "new")


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_every_byte_comes_with_each_kind_of_ticket(
    trees: Trees, name: str, ranks: tuple[int, int]
) -> None:
    way = replace(WAYS[name], ranks=ranks)
    with two_sides(trees, way) as sides:
        check_tickets(sides, way)


@pytest.mark.parametrize("name", WAYS)
def test_producers_know_which_consumers_wait(trees: Trees, name: str) -> None:
    """In both directions at once; what a consumer gives up comes back before its lease is over."""
    way = WAYS[name]
    with two_sides(trees, way) as sides:
        waits = []
        for producer, consumer in itertools.permutations(sides):
            claimed, unclaimed = (producer.serve(lease=way.lease) for _ in range(2))
            consumer.ask("prepare", **claimed.known)
            waits.append((producer, consumer, claimed, unclaimed))
        for producer, consumer, claimed, unclaimed in waits:
            eventually(lambda p=producer, t=unclaimed: p.silent(t), "one is silent")  # type: ignore[misc]
            time.sleep(SETTLE_SECONDS)
            eventually(lambda p=producer, t=claimed: not p.silent(t), "one is heard")  # type: ignore[misc]
            assert [consumer.load(each) for each in (claimed, unclaimed)] == ["", ""]
            assert producer.released(claimed, unclaimed)
            abandoned = producer.serve(lease=way.lease)
            consumer.abandon(abandoned)
            assert producer.released(abandoned)


@pytest.mark.parametrize("driver", DRIVERS)
def test_renewals_keep_pages_beyond_their_lease(trees: Trees, driver: str) -> None:
    with two_sides(trees, Way(driver=driver, ranks=(2, 1), lease=SHORT_LEASE)) as sides:
        waits = []
        for producer, consumer in itertools.permutations(sides):
            kept, lost = (producer.serve(lease=SHORT_LEASE) for _ in range(2))
            consumer.ask("prepare", **kept.known)
            waits.append((producer, consumer, kept, lost))
        time.sleep(WAIT_SECONDS)
        for producer, consumer, kept, lost in waits:
            assert consumer.load(kept) == ""
            assert consumer.load(lost).startswith("stale:")
            assert producer.released(kept, lost)


@pytest.mark.parametrize("driver", DRIVERS)
def test_vllm_engines(trees: Trees, checkpoint: Path, tmp_path: Path, driver: str) -> None:
    """Every text is that of one engine alone, and every token of a prompt was pulled."""
    with fleet(checkpoint, tmp_path) as engines:

        def launch(side: Tree) -> Engine:
            python, extra = Path(sys.executable), {"driver": driver}
            return engines.launch(
                side.name, **DOES_BOTH, extra=extra, python=python, path=side.path
            )

        both = [launch(each) for each in trees]
        engines.wait_started()
        for engine, side in zip(both, trees, strict=True):
            assert Path(engine.run(probes.source)).is_relative_to(side.root)
        prompts = [prompt(length) for length in LENGTHS]
        assert texts(both[0], *prompts) == texts(both[1], *prompts)
        for prefill, decode in itertools.permutations(both):
            before = pulled_by(decode)
            for each, ticket in zip(prompts, prefill.prefill(*prompts), strict=True):
                # A router passes tickets on as JSON.
                check_decoded(prefill, decode, each, json.loads(json.dumps(ticket)))
            assert pulled_by(decode) - before == sum(LENGTHS)
