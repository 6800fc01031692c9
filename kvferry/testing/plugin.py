"""The pytest plugin: what every run knows where kvferry is installed. It imports nothing else."""

from __future__ import annotations

import pytest

# The suite's modules assert in plain words, which pytest makes speak.
pytest.register_assert_rewrite("kvferry.testing.contract")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that the suite uses."""
    config.addinivalue_line(
        "markers", 'slow: takes seconds, or gibibytes; left out with -m "not slow"'
    )
