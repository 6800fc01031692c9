"""Tests: deployments."""
