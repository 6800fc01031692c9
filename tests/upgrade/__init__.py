"""Engines of an older commit hand over to engines of this one: ``make upgrade FROM=<commit>``."""
