"""Faults over many requests."""
