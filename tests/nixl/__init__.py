"""Tests: nixl."""
