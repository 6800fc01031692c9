"""What ``kvferry new-driver`` writes passes the whole conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_new_driver import folder, run_suite

__all__ = ["folder"]


@pytest.mark.timeout(600)
def test_all_tests_of_the_suite_pass_as_written(folder: Path) -> None:
    run_suite(folder)
