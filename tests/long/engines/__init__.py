"""Tests: engines."""
