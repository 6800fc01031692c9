"""Find links and mentions in the documentation that lead nowhere: ``python -m docs.tools.links``.

Checks the links of every Markdown file as they are in the repository: the linked file must be part
of the repository, and must have the heading that the link names. That the site has a place for
every page is checked by ``make docs``. Only the standard library is needed, so that ``make lint``
stays quick.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from posixpath import normpath

ROOT = Path(__file__).resolve().parents[2]

LINK = re.compile(
    r"\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\(\s*<?(?P<target>[^)\s>]+)>?(?P<title>[^)]*)\)"
)
"""Matches a link or an image in Markdown, on one line or several."""

_FENCE = re.compile(r"^ *(`{3,}|~{3,})")
_CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)", re.DOTALL)
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?(?P<target>[^\s>]+)", re.MULTILINE)
_HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
_ANCHOR = re.compile(r"""<a\s+(?:id|name)=["']([^"']+)["']""")
_ELSEWHERE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)
_MENTION = re.compile(r"(?<![\w./-])docs/(?:[\w-]+/)*[\w-]+\.(?:md|svg)\b")


def lines(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield each line of a page outside of blocks of code, after the line's number, from 1."""
    fence = ""
    for number, line in enumerate(markdown.split("\n"), 1):
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not line.strip(" `~"):
                fence = ""
        elif found:
            fence = found[1]
        else:
            yield number, line


def prose(markdown: str) -> str:
    """Return a page with all characters of code replaced, and the others in their places."""
    outside = dict(lines(markdown))
    kept = [
        outside.get(number, " " * len(line)) for number, line in enumerate(markdown.split("\n"), 1)
    ]
    return _CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), "\n".join(kept))


def links(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield the target of each link of a page, after the number of its line, from 1."""
    text = prose(markdown)
    for found in (*LINK.finditer(text), *_REFERENCE.finditer(text)):
        target = found["target"]
        yield 1 + text.count("\n", 0, found.start("target")), target


def anchors(markdown: str) -> set[str]:
    """Return the anchors of a page: what may follow ``#`` in a link to the page.

    They are those that GitHub and the site make of headings, and those in ``<a id="...">``.
    """
    named: Counter[str] = Counter()
    found = set()
    for _, line in lines(markdown):
        found.update(_ANCHOR.findall(line))
        if heading := _HEADING.match(line):
            slug = slugify(heading[1])
            found.add(f"{slug}-{named[slug]}" if named[slug] else slug)
            named[slug] += 1
    return found


def slugify(heading: str) -> str:
    """Return the anchor that GitHub and the site make of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\- ]", "", text.lower())
    return text.strip().replace(" ", "-")


def problems(pages: Mapping[str, str], files: Set[str]) -> Iterator[str]:
    """Yield a line for each link of pages, by their paths, that leads to none of the files."""
    folders = {str(parent) for file in files for parent in PurePosixPath(file).parents}
    named = {path: anchors(text) for path, text in pages.items()}
    for path, text in pages.items():
        for number, target in links(text):
            if _ELSEWHERE.match(target):
                continue
            file, _, anchor = target.partition("#")
            found = normpath(PurePosixPath(path).parent / file) if file else path
            where = f"{path}:{number}: {target}"
            if found not in files and found not in folders:
                yield f"{where}: there is no file {found} in the repository"
            elif anchor and anchor not in named.get(found, ()):
                yield f"{where}: {found} has no heading with that name"


def mentions(texts: Mapping[str, str], files: Set[str]) -> Iterator[str]:
    """Yield a line for each mention of a page of ``docs``, in texts by path, that is none."""
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            for name in _MENTION.findall(line):
                if name not in files:
                    yield f"{path}:{number}: mentions {name}, which does not exist"


def repository(root: Path) -> dict[str, str]:
    """Return the text of every file that git tracks or would add; of a binary one, ``""``."""
    run = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {}
    for name in sorted(set(run.stdout.split("\0"))):
        if name and (root / name).is_file():
            content = (root / name).read_bytes()
            found[name] = "" if b"\0" in content else content.decode(errors="replace")
    return found


def main() -> int:
    """Print every link and mention that leads nowhere; return 1 if there is one, else 0."""
    texts = repository(ROOT)
    pages = {path: text for path, text in texts.items() if path.endswith(".md")}
    read = {path: text for path, text in texts.items() if not path.startswith("tests/")}
    found = [*problems(pages, texts.keys()), *mentions(read, texts.keys())]
    sys.stderr.writelines(f"{problem}\n" for problem in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
