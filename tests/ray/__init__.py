"""Tests: ray."""
