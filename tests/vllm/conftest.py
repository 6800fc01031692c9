"""What all tests that need vLLM share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
MARKS = (
    pytest.mark.timeout(300),  # the first imports vLLM
    # Of what vLLM imports.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::UserWarning:torch",
        "error::DeprecationWarning:kvferry",
    ),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here."""
    for item in items:
        if FOLDER in item.path.parents:
            for mark in MARKS:
                item.add_marker(mark)


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are tiny, and the threads of torch would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
