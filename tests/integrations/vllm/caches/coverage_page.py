"""Write ``docs/coverage.md``: which caches of vLLM are described, opaque or refused.

``python -m tests.integrations.vllm.caches.coverage_page`` writes the page from the tables that an
engine uses and from the source of the installed vLLM.
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
# Which of vLLM's caches are covered

`{command}` makes this page from the tables
that an engine uses and from the source of vLLM {version}. `make test` fails if the page is out of
date, or if vLLM has something that none of the tables names.

- **described**: the layout says where each element is, so engines with different parallelism, block
  size, order or backend can exchange the cache.
- **opaque**: a page moves as a whole between engines that store it in exactly the same way
  (backend, type, shape, strides and processor). Other pairs of engines are refused at the
  handshake. Backends that are in no table are opaque, too.
- **refused**: an engine with such a cache does not start with this connector.

The descriptions come from vLLM's source. Tests write through the backend's own expressions and find
the same bytes through the layout, in each order that vLLM offers with the backend. The kernels
themselves were run on CPUs only.
"""

KINDS = """\
## Kinds of cache

vLLM's `KVCacheSpec` classes: `kvferry/integrations/vllm/caches/cache_specs.py`.

A **paged** cache is handled by its attention backend (next section), a **state** by its own backend
(last section), and **members** by the spec of each layer. A *hole* is a position without a page.
"""

MEDIA = """\
## Models that take media

The caches of multimodal models are the same as those of text models, and a ticket also says for
which images, videos and audio clips it was made ([Images and other
media](vllm.md#images-and-other-media)). Whole engines were run on CPUs with small models of
random weights: Idefics3 in `make test`; Qwen2-VL (M-RoPE, also with videos), LLaVA and Gemma 3
(sliding windows) by hand. vLLM's CPU backend ignores that the tokens of Gemma 3's images attend
to each other in both directions, so that this was not run. Audio was not run either.
Encoder-decoder models are refused.
"""

BACKENDS = """\
## Attention backends

By the name that vLLM gives them: `kvferry/integrations/vllm/caches/attention_pages.py`. The orders
are the values of `VLLM_KV_CACHE_LAYOUT` that vLLM offers with a backend; names beside `any` are the
orders that remain on some processors or with some settings. Between equal engines, an order that
begins with B needs one copy per block. An order that begins with L needs one copy per page of each
layer, and if H stands before B, one per head of each page.
"""

RECURRENT = """\
## States

By the name that vLLM gives the backend: `kvferry/integrations/vllm/caches/state_pages.py`. A state
that cannot be divided moves as a whole between engines that split it in the same way.
"""


def written() -> str:
    """The page."""
    import vllm

    introduction = INTRODUCTION.format(command=COMMAND, version=vllm.__version__.partition("+")[0])
    parts = (
        introduction,
        KINDS,
        _table(("spec", "handling", "why"), _kinds()),
        MEDIA,
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
