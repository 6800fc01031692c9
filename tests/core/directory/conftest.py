"""Tests of the directory have the fixtures of those of endpoints."""

from tests.core.endpoint.conftest import clock, decode, driver, prefill

__all__ = ["clock", "decode", "driver", "prefill"]
