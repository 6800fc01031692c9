"""Tests leave nothing behind in engines that others use after them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import probes
from tests.engines.conversations import forget, only_holds
from tests.engines.engines import Engine
from tests.engines.fixtures import AT_START
from tests.engines.pairs import Pair
from tests.engines.ranks import come_to
from tests.engines.steps import eventually

SHARED = ("decode", "pair", "prefill")
"""Names of fixtures that give engines to many tests."""


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test, shared engines have no request, and all blocks that they had at their start.

    Holds that nobody came for are given up first: a pair's of conversations only, of which a
    test may lead none to an end; of other engines also those whose tickets a test forged.
    """
    engines: list[Any] = []
    for name in sorted({*SHARED} & {*request.fixturenames}):
        found = request.getfixturevalue(name)
        engines += found.engines if isinstance(found, Pair) else [found]
    shared = [one for one in engines if isinstance(one, Engine) and one.name in AT_START]
    yield
    if "pair" in request.fixturenames:
        forget(*shared)
    else:
        eventually(lambda: all(engine.run(only_holds) for engine in shared))
        for engine in shared:
            engine.run(probes.reset_prefix_cache)
    come_to([AT_START[engine.name] for engine in shared], *shared)
