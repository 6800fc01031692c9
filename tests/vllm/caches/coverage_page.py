"""Write the tables of caches in ``docs/coverage.md``: which are described, opaque or refused.

``python -m tests.vllm.caches.coverage_page`` makes them from those that an engine uses and from the
source of the installed vLLM. The text and the table of architectures are written by hand.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvferry.integrations.vllm.caches.attention_pages import PACKINGS, unknown
from kvferry.integrations.vllm.caches.cache_kinds import CACHE_KINDS
from kvferry.integrations.vllm.caches.state_pages import STATE_PACKINGS
from tests.vllm.caches import census

PAGE = Path(__file__).parents[3] / "docs" / "coverage.md"
COMMAND = "python -m tests.vllm.caches.coverage_page"


def with_caches(page: str) -> str:
    """Return a page whose version and tables of caches are as they should be."""
    page = re.sub(r"(?<=the source of vLLM )\d+\.\d+\.\d+", _version(), page)
    for head, rows in (
        (("spec", "handling", "why"), _kinds()),
        (("verdict", "a page holds", "opaque where", "orders", "backends"), _backends()),
        (("verdict", "a page holds", "backends"), _states()),
    ):
        page = with_table(page, head, rows)
    return page


def _version() -> str:
    import vllm

    return str(vllm.__version__).partition("+")[0]


def with_table(page: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, ruler, *body = (
        f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows)
    )
    before, found, rest = page.partition(f"\n{first}")
    assert found, f"the page has no table with the head {first}"
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    return "".join((before, "\n", first, ruler, *body, after))


def _kinds() -> Iterator[Sequence[str]]:
    for name, verdict in sorted(CACHE_KINDS.items()):
        yield f"`{name}`", verdict.handling.value, verdict.why


def _backends() -> Iterator[Sequence[str]]:
    orders = {backend.name: " ".join(backend.orders) for backend in census.backends()}
    about = {
        name: (
            "opaque" if packing.fields is unknown else "described",
            packing.inside,
            packing.unless,
            orders.get(name.partition("/")[0], ""),
        )
        for name, packing in PACKINGS.items()
    }
    return _grouped(sorted(about.items(), key=lambda item: item[1]))


def _states() -> Iterator[Sequence[str]]:
    return _grouped(
        (name, ("described", STATE_PACKINGS[name].inside)) for name in sorted(STATE_PACKINGS)
    )


def _grouped(about: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[Sequence[str]]:
    """Yield a row for all names of which the same is said: that, and the names."""
    alike = defaultdict(list)
    for name, said in about:
        alike[said].append(name)
    for said, names in alike.items():
        yield *said, ", ".join(f"`{name}`" for name in sorted(names, key=str.casefold))


if __name__ == "__main__":
    PAGE.write_text(with_caches(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
