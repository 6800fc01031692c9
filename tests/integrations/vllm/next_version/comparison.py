"""Differences between two versions of vLLM, and what they mean here, as a page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from tests.integrations.vllm.next_version.source import Source

Verdicts = Mapping[str, str]
"""What maintainers found out about differences, by ``Finding.name``."""

OPEN = "**look**"
NEW, GONE, CHANGED = "new", "gone", "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Facts of one kind, in which two versions may differ.

    Attributes:
        look: Where in kvferry a difference may matter.
        facts: Returns texts of one or more lines by name.
        verdict: What follows from kvferry's own code and tables: takes a name and both texts,
            ``None`` for a missing one, and returns an empty text if nothing does.
        counts: Which differences count.
        is_long: Whether only the kind of a difference is said, and no text.
    """

    title: str
    look: str
    facts: Callable[[Source], Mapping[str, str]]
    verdict: Callable[[str, str | None, str | None], str] = lambda name, was, now: ""
    counts: Collection[str] = (NEW, GONE, CHANGED)
    is_long: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A difference between two versions; the verdict is empty if nobody has looked at it."""

    name: str
    change: str
    verdict: str


def findings(section: Section, old: Source, new: Source, verdicts: Verdicts) -> list[Finding]:
    """Return the differences of a section, each with the verdict on it."""
    before, after, found = section.facts(old), section.facts(new), []
    for name in sorted({*before, *after}):
        was, now = before.get(name), after.get(name)
        kind = NEW if was is None else GONE if now is None else CHANGED
        if was != now and kind in section.counts:
            change = kind if section.is_long else f"{kind}: {_change(was, now)}"
            verdict = section.verdict(name, was, now) or verdicts.get(name, "")
            found.append(Finding(name=name, change=change, verdict=verdict))
    return found


def _change(was: str | None, now: str | None) -> str:
    """Return a text that only one version has, or which lines differ between both."""
    before, after = (was or "").splitlines(), (now or "").splitlines()
    if was is None or now is None:
        return _listed(before or after)
    gone = [line for line in before if line not in after]
    added = [line for line in after if line not in before]
    if not gone and not added:
        return f"the order is {_listed(after)}"
    return f"{_listed(gone) or 'nothing'} became {_listed(added) or 'nothing'}"


def _listed(lines: Collection[str]) -> str:
    """Return lines as Markdown, shortened."""
    short = (line if len(line) <= 160 else f"{line[:157]}..." for line in lines)
    return ", ".join(f"`{line}`" for line in short)


def page(found: Mapping[Section, Collection[Finding]], versions: str) -> str:
    """Return the comparison as Markdown."""
    everything = [each for some in found.values() for each in some]
    waiting = sum(not each.verdict for each in everything)
    lines = [
        f"vLLM {versions}: {len(everything)} differences, of which {waiting} have no verdict yet "
        f"({OPEN}).",
        "",
    ]
    for section, some in found.items():
        lines += [f"### {section.title}", "", *_table(section, some), ""]
    return "\n".join(lines)


def _table(section: Section, found: Collection[Finding]) -> Iterator[str]:
    if not found:
        yield "No difference."
        return
    yield from (
        f"Look at {section.look}",
        "",
        "| what | difference | here |",
        "| --- | --- | --- |",
    )
    for each in found:
        cells = (f"`{each.name}`", each.change, each.verdict or OPEN)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
