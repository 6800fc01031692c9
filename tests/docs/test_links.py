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


def problems_of(text: str) -> list[str]:
    return list(problems({**PAGES, "docs/new.md": text}, FILES | {"docs/new.md"}))


def test_valid_links_have_no_problem() -> None:
    assert list(problems(PAGES, FILES)) == []
    assert (
        problems_of("[a](../src) [b](guide.md) <https://example.org> [c](mailto:a@example.org)")
        == []
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
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
    [said] = problems_of(text)
    assert problem in said


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
    texts = {"a.py": '"""See docs/guide.md, and docs/old/page.md."""'}
    assert list(mentions(texts, FILES)) == [
        "a.py:1: mentions docs/old/page.md, which does not exist"
    ]


# Links on the site.


def rewritten(markdown: str, page: str = "drivers.md", repository: str = "") -> str:
    """Return a page as the hook of the site rewrites it."""
    config = SimpleNamespace(repo_url=repository, docs_dir=str(ROOT / "docs"))
    asked = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    return hooks.on_page_markdown(markdown, asked, config, SimpleNamespace())


@pytest.mark.parametrize(
    ("page", "link", "moved"),
    [
        ("drivers.md", "../ARCHITECTURE.md", "architecture.md"),
        ("drivers.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("adr/README.md", "../../CONTRIBUTING.md#code", "../contributing.md#code"),
        ("architecture.md", "docs/adr", "adr/README.md"),
        ("example-driver.md", "../../docs/writing-a-driver.md", "writing-a-driver.md"),
    ],
)
def test_repository_links_become_site_links(page: str, link: str, moved: str) -> None:
    assert rewritten(f"see [it]({link}).", page) == f"see [it]({moved})."
    code = "see [the `code`](../kvferry/core/errors.py)."
    assert rewritten(code) == "see the `code`."
    assert rewritten(code, repository="https://example.org/kvferry/") == (
        "see [the `code`](https://example.org/kvferry/blob/main/kvferry/core/errors.py)."
    )


def test_code_is_not_rewritten() -> None:
    text = "`[a](../README.md)` and ![an icon](pictures/icon.svg)\n\n```\n[a](../README.md)\n```\n"
    assert rewritten(text) == text
