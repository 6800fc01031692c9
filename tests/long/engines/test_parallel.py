"""More pairs of engines that split their model differently."""

from __future__ import annotations

import pytest

from tests.engines.engines import Engine
from tests.engines.test_parallel import (
    References,
    check_pair,
    checkpoints,
    hub,
    other,
    pairs,
    references,
)

__all__ = ["checkpoints", "hub", "other", "references"]

pytestmark = pytest.mark.timeout(600)

HUBS = [
    ("2 KV heads", "tp2", ["tp2", "tp4"]),
    ("2 KV heads", "pp2", ["pp2", "pp3", "tp2", "tp2-pp2"]),
    ("2 KV heads", "tp2-block64", ["plain", "block96", "tp2"]),
    ("2 KV heads", "tp2-ahead", ["tp2-ahead", "pp2-chunked"]),
    ("1 KV head", "tp3", ["plain", "tp2"]),
    ("12 KV heads", "tp2", ["tp3", "tp4"]),
]


@pytest.mark.parametrize(("hub", "other"), pairs(HUBS), indirect=True)
def test_pair(hub: Engine, other: Engine, references: References) -> None:
    check_pair(hub, other, references)
