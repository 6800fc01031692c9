"""What is described, opaque or refused, as a page for people: ``docs/coverage.md``.

Written by ``python -m tests.integrations.vllm.caches.coverage_page`` from the tables that an
engine uses and from the source of the vLLM that is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.integrations.vllm.caches.attention_pages import PACKINGS, unknown
from kvferry.integrations.vllm.caches.cache_specs import SPECS
from kvferry.integrations.vllm.caches.state_pages import STATE_PACKINGS
from tests.integrations.vllm.caches import census

PAGE = Path(__file__).parents[4] / "docs" / "coverage.md"
COMMAND = "python -m tests.integrations.vllm.caches.coverage_page"

INTRODUCTION = """\
# What of vLLM is covered

Made by `{command}` from the tables that an
engine uses, and from the source of vLLM {version}.
`make test` fails while it is out of date, or when vLLM has something that none of the tables names.

- **described**: the layout says where each element is, so that engines with other parallelism,
  block size, order or backend can exchange it.
- **opaque**: a page moves as a whole between engines that keep it in exactly the same way (backend,
  type, shape, strides and processor), and a pair that does not is refused at handshake. So is every
  backend that is in no table.
- **refused**: an engine that has it does not start with this connector.

What was described was read in vLLM's source; tests write through the backend's own expressions and
find the same bytes through the layout, in each order that vLLM offers with it. Kernels themselves
were asked on CPUs only.
"""

KINDS = """\
## Kinds of cache

vLLM's `KVCacheSpec` classes: `kvferry/integrations/vllm/caches/cache_specs.py`.
"""

BACKENDS = """\
## Attention backends

By the name that vLLM gives them: `kvferry/integrations/vllm/caches/attention_pages.py`. The orders
are those of `VLLM_KV_CACHE_LAYOUT` that vLLM offers with a backend; names beside `any` are what is
left on some processors or with some settings. Between equal engines an order that leads with B
costs one copy per block; one that leads with L, one per page of each layer, and where H stands
before B, one per head of it.
"""

RECURRENT = """\
## States

`kvferry/integrations/vllm/caches/state_pages.py`. What cannot be taken apart moves as a whole
between engines that split it alike.
"""


def written() -> str:
    """The page."""
    import vllm

    introduction = INTRODUCTION.format(command=COMMAND, version=vllm.__version__.partition("+")[0])
    parts = (
        introduction,
        KINDS,
        _table(("spec", "handling", "why"), _kinds()),
        BACKENDS,
        _table(("backend", "orders", "verdict", "a page holds", "opaque where"), _backends()),
        RECURRENT,
        _table(("backend", "verdict", "a page holds"), _states()),
    )
    return "\n".join(parts)


def _kinds() -> Iterator[Sequence[str]]:
    for name, verdict in sorted(SPECS.items()):
        yield f"`{name}`", verdict.handling.value, verdict.why


def _backends() -> Iterator[Sequence[str]]:
    orders = {backend.name: " ".join(backend.orders) for backend in census.backends()}
    for name, packing in sorted(PACKINGS.items(), key=lambda item: item[0].casefold()):
        known = packing.fields is not unknown
        offered = orders.get(name.partition("/")[0], "")
        verdict = "described" if known else "opaque"
        yield f"`{name}`", offered, verdict, packing.inside, packing.unless


def _states() -> Iterator[Sequence[str]]:
    for name, packing in sorted(STATE_PACKINGS.items()):
        yield f"`{name}`", "described", packing.inside


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
