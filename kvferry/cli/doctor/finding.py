"""What ``kvferry doctor`` finds, as data."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FindingLevel(enum.Enum):
    """What a finding means."""

    OK = "ok"
    """Works, or is nothing to worry about."""
    WARN = "warn"
    """Works, but not everything, or not well."""
    BAD = "bad"
    """Does not work; the exit status says so, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: of what was looked at.
        verdict: what that means.
        found: what it is.
        remedy: what to do about it; empty if there is nothing to do.
    """

    name: str
    verdict: FindingLevel
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    """A finding that needs no remedy."""
    return Finding(name=name, verdict=FindingLevel.OK, found=found)


def warn(name: str, found: str, remedy: str) -> Finding:
    """A finding that is worth knowing."""
    return Finding(name=name, verdict=FindingLevel.WARN, found=found, remedy=remedy)


def bad(name: str, found: str, remedy: str) -> Finding:
    """A finding that has to be remedied."""
    return Finding(name=name, verdict=FindingLevel.BAD, found=found, remedy=remedy)
