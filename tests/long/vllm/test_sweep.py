"""Any two shapes of any model, searched for longer."""

from __future__ import annotations

from hypothesis import settings

from tests.vllm.geometry.test_sweep import (
    SEARCH,
    any_pair,
    any_staged_traffic,
    any_traffic,
    check_pair,
    check_traffic,
)

test_any_pair = settings(SEARCH, max_examples=200)(any_pair(check_pair))
test_any_traffic = settings(SEARCH, max_examples=75)(any_traffic(check_traffic))
test_any_staged_traffic = settings(SEARCH, max_examples=75)(any_staged_traffic(check_traffic))
