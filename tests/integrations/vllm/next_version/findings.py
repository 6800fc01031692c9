"""A difference between two versions of vLLM, and what it means here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")

Verdicts = Mapping[str, str]
"""What a maintainer found out about differences, by ``Finding.name``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A difference between two versions."""

    name: str
    change: str
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The differences of one kind."""

    title: str
    look: str
    findings: tuple[Finding, ...]


def judged(section: Section, verdicts: Verdicts) -> Section:
    """Return a section with the verdicts of maintainers on what has no verdict otherwise."""
    found = tuple(
        finding if finding.verdict else replace(finding, verdict=verdicts.get(finding.name, ""))
        for finding in section.findings
    )
    return replace(section, findings=found)


def changed_values(
    old: Mapping[str, T], new: Mapping[str, T]
) -> Iterator[tuple[str, T | None, T | None]]:
    """Yield the names whose values differ, with both values; ``None`` for a missing one."""
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def described_changes(
    old: Mapping[str, str], new: Mapping[str, str], verdict: Callable[[str], str] = lambda _: ""
) -> tuple[Finding, ...]:
    """Return a finding for each name whose text differs."""
    return tuple(
        Finding(name=name, change=described_change(was, now), verdict=verdict(name))
        for name, was, now in changed_values(old, new)
    )


def changed_texts(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return a finding for each name whose text differs, without the texts."""
    return tuple(
        Finding(name=name, change="new" if was is None else "gone" if now is None else "changed")
        for name, was, now in changed_values(old, new)
    )


def described_change(old: str | None, new: str | None) -> str:
    """Return how a value changed, as text."""
    if old is None:
        return f"new: {code(new or '')}"
    if new is None:
        return f"gone: {code(old)}"
    return f"{code(old)} became {code(new)}"


def code(text: str) -> str:
    """Return source text on one line as Markdown, shortened; an empty text stays empty."""
    line = " ".join(text.split())
    return f"`{line if len(line) <= 160 else line[:157] + '...'}`" if line else ""
