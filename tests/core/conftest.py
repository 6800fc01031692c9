"""What most tests of endpoints, of the directory and of whole engines need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.endpoint.engines import Clock, Engine, RecordingTransport
from tests.core.endpoint.transports import ScriptedTransport


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def driver() -> ScriptedTransport:
    """The transport of a decode engine that the test makes."""
    return ScriptedTransport()


@pytest.fixture
def producer_transport() -> RecordingTransport:
    """The transport of a prefill engine that the test makes."""
    return RecordingTransport()


@pytest.fixture
def prefill() -> Iterator[Engine]:
    with Engine("prefill") as engine:
        yield engine


@pytest.fixture
def decode() -> Iterator[Engine]:
    with Engine("decode") as engine:
        yield engine
