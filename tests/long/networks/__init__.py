"""Tests: networks."""
