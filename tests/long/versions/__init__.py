"""Engines of every two supported versions of vLLM."""
