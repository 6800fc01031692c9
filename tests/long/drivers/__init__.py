"""Tests: drivers."""
