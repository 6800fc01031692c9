"""Links between pages: what ``make lint`` checks, and links of the site."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from docs.tools import hooks
from docs.tools.links import ROOT, anchors, links, mentions, problems

PAGES = {
    "README.md": "See [the guide](docs/guide.md#a-step-of-two) and [code](src/a.py).\n",
    "docs/guide.md": "# Guide\n\n## A step, of *two*\n\n[back](../README.md) [here](#guide)\n",
}
FILES = {*PAGES, "src/a.py"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](../src) [b](guide.md) <https://example.org> [c](mailto:a@example.org)", ""),
        ("[a](none.md)", "docs/new.md:1: none.md: there is no file docs/none.md"),
        ("[a](../../other/b.md)", "there is no file ../other/b.md"),
        ("[a](guide.md#no-step)", "docs/guide.md has no heading with that name"),
        ("x\n[a](#nowhere)", "docs/new.md:2: #nowhere: docs/new.md has no heading"),
        ("![a](missing.svg)", "there is no file docs/missing.svg"),
        ("[over\ntwo lines](none.md)", "docs/new.md:2: none.md"),
        ("[a]: none.md\n", "docs/new.md:1: none.md"),
        ("[`code` and [brackets]](none.md)", "none.md"),
    ],
)
def test_broken_link_is_reported(text: str, problem: str) -> None:
    found = list(problems({**PAGES, "docs/new.md": text}, FILES | {"docs/new.md"}))
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_links_in_code_are_ignored() -> None:
    for text in (
        "`[a](none.md)`",
        "``[a](none.md) ` [b](none.md)``",
        "```\n[a](none.md)\n```",
        "````md\n```\n[a](none.md)\n```\n````",
        "a list:\n\n  ~~~\n  [a](none.md)\n  ~~~",
    ):
        assert list(links(text)) == []


def test_anchors_are_those_of_github() -> None:
    page = '# A `b`: c (d)\n## Twice\n## Twice\n### [Linked](x.md) & more\n<a id="own"></a>\n'
    assert anchors(page) == {"a-b-c-d", "twice", "twice-1", "linked--more", "own"}


def test_mention_of_missing_page_is_reported() -> None:
    found = list(mentions({"a.py": "See docs/guide.md, and docs/old/page.md."}, FILES))
    assert found == ["a.py:1: mentions docs/old/page.md, which does not exist"]


@pytest.mark.parametrize(
    ("page", "link", "moved"),
    [
        ("drivers.md", "../ARCHITECTURE.md", "[it](architecture.md)"),
        ("drivers.md", "https://example.org/a.md", "[it](https://example.org/a.md)"),
        ("adr/README.md", "../../CONTRIBUTING.md#code", "[it](../contributing.md#code)"),
        ("architecture.md", "docs/adr", "[it](adr/README.md)"),
        ("example-driver.md", "../../docs/writing-a-driver.md", "[it](writing-a-driver.md)"),
        ("drivers.md", "../kvferry/core/errors.py", "it"),
    ],
)
def test_repository_links_become_site_links(page: str, link: str, moved: str) -> None:
    """Outside of code; those of no page are only text where no repository is known."""
    code = f"`[it]({link})`\n\n```\n[it]({link})\n```\n"
    config = SimpleNamespace(repo_url="", docs_dir=str(ROOT / "docs"))
    asked = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    found = hooks.on_page_markdown(f"see [it]({link}).{code}", asked, config, SimpleNamespace())
    assert found == f"see {moved}.{code}"
