"""Tests: faults."""
