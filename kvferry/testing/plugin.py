"""The pytest plugin, loaded in every run where kvferry is installed. It imports only pytest."""

from __future__ import annotations

import pytest

# The suite's modules use plain asserts, which pytest rewrites to show their values.
pytest.register_assert_rewrite("kvferry.testing.contract")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that the suite uses."""
    config.addinivalue_line(
        "markers", 'slow: takes seconds, or gibibytes; left out with -m "not slow"'
    )
