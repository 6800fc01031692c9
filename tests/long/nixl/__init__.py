"""Modes of the driver nixl that need a setting."""
