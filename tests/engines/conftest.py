"""Tests leave nothing behind in engines that others use after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.conversations import forget
from tests.engines.engines import Engine
from tests.engines.fixtures import AT_START
from tests.engines.pairs import Pair
from tests.engines.ranks import come_to

SHARED = ("decode", "pair", "prefill", "reference")
"""Names of fixtures that give engines to many tests."""


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test, shared engines have no request, and all blocks that they had at their start.

    Conversations that were not led to an end are forgotten first.
    """
    engines: list[Engine] = []
    for name in sorted({*SHARED} & {*request.fixturenames}):
        found = request.getfixturevalue(name)
        engines += found.engines if isinstance(found, Pair) else [found]
    yield
    shared = [engine for engine in engines if engine.name in AT_START]
    forget(*(engine for engine in shared if "pair" in request.fixturenames))
    come_to([AT_START[engine.name] for engine in shared], *shared)
