"""Hooks of mkdocs: pages from elsewhere in the repository, links, generated tables, redirects.

The pages in ``docs`` are written to be read in the repository, too. So their links lead to files of
the repository, by relative paths. These hooks turn such links into links of the site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

from docs.tools import links, reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

IMPORTED = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/kvferry-mooncake/README.md": "example-driver.md",
    "examples/two_ranks.py": "two-ranks.md",
}
"""For each file outside of ``docs`` that is a page of the site: the path of the page."""

SHOWN = {**IMPORTED, "docs/adr": "adr/README.md"}
"""For each place in the repository that a link may lead to: the path of the page that stands for
it on the site."""

_GENERATED: dict[str, Callable[[str], str]] = {
    "settings": reference.settings,
    "commands": reference.commands,
}
_MARK = re.compile(r"^<!-- generated: (\w+) ([\w.:]+) -->$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> None:
    """Replace each folder in the site's navigation by all pages of the folder."""
    config.nav = _expanded(config.nav or [], Path(config.docs_dir))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site, with the pages made from files outside of ``docs`` added."""
    from mkdocs.structure.files import File

    for source, page in IMPORTED.items():
        text = (ROOT / source).read_text()
        content = text if source.endswith(".md") else _listing(source, text)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the Markdown of a page with its generated parts filled in and its links converted."""
    del files
    markdown = _MARK.sub(lambda mark: _GENERATED[mark[1]](mark[2]), markdown)
    uri = page.file.src_uri
    source = next((file for file, own in IMPORTED.items() if own == uri), f"docs/{uri}")
    repository = str(config.repo_url or "")
    made: list[str] = []
    end = 0
    for link in links.LINK.finditer(links.prose(markdown)):
        text = markdown[slice(*link.span("text"))]
        made += [
            markdown[end : link.start()],
            _moved(text, link["target"], source, uri, repository),
        ]
        end = link.end()
    return "".join((*made, markdown[end:]))


def _expanded(nav: list[object], folder: Path) -> list[object]:
    """Return a navigation in which each folder is replaced by its pages, ``README.md`` first."""
    found: list[object] = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/"):
            names = sorted(path.name for path in (folder / entry).glob("*.md"))
            names.sort(key=lambda name: name != "README.md")
            found += [f"{entry}{name}" for name in names]
        elif isinstance(entry, dict):
            [(title, inner)] = entry.items()
            found.append({title: _expanded(inner, folder) if isinstance(inner, list) else inner})
        else:
            found.append(entry)
    return found


def _listing(source: str, text: str) -> str:
    title = PurePosixPath(source).name
    return f"# {title}\n\n`{source}`\n\n```python\n{text}```\n"


def _moved(text: str, target: str, source: str, uri: str, repository: str) -> str:
    """Return a link of the file ``source`` as Markdown for the page ``uri`` of the site."""
    path, _, anchor = target.partition("#")
    anchor = f"#{anchor}" if anchor else ""
    if not path or re.match(r"[a-z]+:", path):
        return f"[{text}]({target})"
    found = normpath(PurePosixPath(source).parent / path)
    page = SHOWN.get(found)
    if page is None and found.startswith("docs/") and (ROOT / found).is_file():
        page = found.removeprefix("docs/")
    # A file that is no page is linked where the repository is, if that is known.
    if page is None and (ROOT / found).exists() and not found.startswith(".."):
        return f"[{text}]({repository.rstrip('/')}/blob/main/{found})" if repository else text
    # A target that does not exist stays as it is, so that mkdocs reports it.
    return f"[{text}]({relpath(page, PurePosixPath(uri).parent) if page else path}{anchor})"
