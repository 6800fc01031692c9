"""Tests: ucx."""
