"""The hand-over between real engines over the driver ucx: TCP only."""

from __future__ import annotations

import pytest

from tests.engines.test_over_drivers import engines, test_conversation, test_early, test_hand_over

__all__ = ["engines", "test_conversation", "test_early", "test_hand_over"]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.parametrize("engines", ["ucx over tcp"], indirect=True),
]
