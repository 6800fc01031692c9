"""Early loads with adapters that wait until ``load_timeout``."""

from __future__ import annotations

import pytest

from tests.engines.test_lora_live import (
    Adapter,
    Engines,
    adapters,
    check_other_adapter,
    engines,
    first,
    second,
)

__all__ = ["adapters", "engines", "first", "second"]

pytestmark = pytest.mark.timeout(300)


def test_no_part_comes_for_an_adapter_of_another_name(
    engines: Engines, adapters: dict[str | None, Adapter]
) -> None:
    check_other_adapter(engines, adapters, "first", "second")
