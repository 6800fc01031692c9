"""Every order of a cache against every other."""

from __future__ import annotations

import itertools

import pytest

from tests.vllm.geometry.test_crossing import ORDERS, check_orders


@pytest.mark.parametrize(
    ("there", "here"), list(itertools.combinations_with_replacement(ORDERS, 2))
)
def test_orders(there: str, here: str) -> None:
    check_orders(there, here)
