"""The comparison of two vLLMs as a page: which differences have a verdict, and which have not."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.integrations.vllm.next_version import caches, hooks, names
from tests.integrations.vllm.next_version.findings import Finding, Section, judged
from tests.integrations.vllm.next_version.source import Source
from tests.integrations.vllm.next_version.verdicts import VERDICTS

CONNECTOR = names.OURS / "connector.py"
OPEN = "**look**"


def compared(old: Source, new: Source) -> list[Section]:
    """Return every difference between two vLLMs that may matter to the connector."""
    sections = [
        hooks.hook_section(old, new, connector_methods()),
        hooks.call_section(old, new),
        hooks.machinery_section(old, new),
        caches.spec_section(old, new),
        caches.backend_section(old, new),
        caches.kernel_section(old, new),
        caches.native_section(old, new),
        caches.value_section(old, new),
        names.ticket_section(old, new),
        names.connector_section(old, new),
        names.import_section(old, new),
        names.attribute_section(old, new),
    ]
    return [judged(each, VERDICTS.get(each.title, {})) for each in sections]


def connector_methods(path: Path = CONNECTOR) -> set[str]:
    """Return the names of the methods that ``KVFerryConnector`` defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for cls in tree.body
        if isinstance(cls, ast.ClassDef) and cls.name == "KVFerryConnector"
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
    }


def open_findings(sections: Sequence[Section]) -> list[Finding]:
    """Return the differences that have no verdict yet."""
    return [each for section in sections for each in section.findings if not each.verdict]


def unused_verdicts(sections: Sequence[Section]) -> list[str]:
    """Return the names in ``VERDICTS`` that no difference has, or that need no entry there."""
    return [
        f"{section.title}: {name}"
        for section in sections
        for name, verdict in VERDICTS.get(section.title, {}).items()
        if verdict not in {each.verdict for each in section.findings if each.name == name}
    ]


def page(old: Source, new: Source, sections: Sequence[Section]) -> str:
    """Return the comparison as Markdown."""
    total = sum(len(section.findings) for section in sections)
    waiting = len(open_findings(sections))
    lines = [
        f"vLLM {new.version} beside {old.version}: {total} differences, of which {waiting} have no "
        f"verdict yet ({OPEN}).",
        "",
    ]
    for section in sections:
        lines += [f"### {section.title}", "", *_body(section), ""]
    return "\n".join(lines)


def _body(section: Section) -> Iterator[str]:
    if not section.findings:
        yield "No difference."
        return
    yield f"Look at {section.look}" + ("" if section.look.endswith("?") else ".")
    yield ""
    yield "| what | difference | here |"
    yield "| --- | --- | --- |"
    for each in section.findings:
        cells = (f"`{each.name}`", each.change, each.verdict or OPEN)
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    """Return text as it may stand in a cell of a table."""
    return text.replace("|", "\\|")
