"""``Finding``: the result of one check of ``kvferry doctor``."""

from __future__ import annotations

import enum

from msgspec import Struct


class FindingLevel(enum.Enum):
    """How serious a finding is; a bad one makes the exit status of the command 1."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


class Finding(Struct, frozen=True, kw_only=True):
    """The result of one check; ``remedy`` is empty if there is nothing to do."""

    name: str
    verdict: FindingLevel
    found: str
    remedy: str = ""


class Check(str):
    """What is checked: the name of its findings."""

    __slots__ = ()

    def ok(self, found: str) -> Finding:
        """Return a finding that needs no remedy."""
        return Finding(name=str(self), verdict=FindingLevel.OK, found=found)

    def warn(self, found: str, remedy: str) -> Finding:
        """Return a finding that is worth knowing."""
        return Finding(name=str(self), verdict=FindingLevel.WARN, found=found, remedy=remedy)

    def bad(self, found: str, remedy: str) -> Finding:
        """Return a finding that needs its remedy."""
        return Finding(name=str(self), verdict=FindingLevel.BAD, found=found, remedy=remedy)
