"""Engines of an older commit and of this one beside each other: ``make upgrade FROM=<commit>``."""
