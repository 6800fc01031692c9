"""Write ``docs/coverage.md``: which caches of vLLM are described, opaque or refused.

``python -m tests.vllm.caches.coverage_page`` writes the page from the tables that an
engine uses and from the source of the installed vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvferry.integrations.vllm.caches.attention_pages import PACKINGS, unknown
from kvferry.integrations.vllm.caches.cache_specs import SPECS
from kvferry.integrations.vllm.caches.state_pages import STATE_PACKINGS
from tests.vllm.caches import architectures, census

PAGE = Path(__file__).parents[3] / "docs" / "coverage.md"
COMMAND = "python -m tests.vllm.caches.coverage_page"

VERDICTS = (
    "served, on engines",
    "served, by geometry",
    "served, by kind",
    "moved whole",
    "draft",
    "refused",
)
"""The verdicts on architectures, in the order in which they are counted."""

INTRODUCTION = """\
# Which of vLLM's caches are covered

`{command}` makes this page from the tables
that an engine uses and from the source of vLLM {version}. `make test` fails if the page is out of
date, or if vLLM has something that none of the tables names.

- **described**: the layout says where each element is, so engines with different parallelism, block
  size, order or backend can exchange the cache.
- **opaque**: a page moves as a whole between engines that store it in exactly the same way
  (backend, type, shape, strides, processor and release of vLLM). Other pairs of engines are refused
  at the handshake. Backends that are in no table are opaque, too.
- **refused**: an engine with such a cache does not start with this connector.

[A table of all architectures](#architectures) at the end of this page has the verdict on each.
The number of architectures with each verdict, and what the verdicts mean:

{counts}
- **served, on engines**: whole engines of the architecture hand requests over, in the test that
  the table names (`tests/engines`) or by hand, on CPUs, with small models of random
  weights.
- **served, by geometry**: no engine of the architecture was run. vLLM's allocator and scheduler lay
  out caches of these kinds, and every byte is checked after a hand-over between engines of other
  parallelism, block size and order. The kinds are those of vLLM's specs; how an attention backend
  packs a page is checked for each backend, as said below.
- **served, by kind**: its kinds of cache are described. What the table's last column names was
  checked by the expressions of vLLM's source only, or is known only with the checkpoint.
- **moved whole**: the pages of the backends that the table names move between equal engines only.
- **refused**: an engine does not start with this connector.
- **draft**: a model that runs in the engine of the model that it drafts for. Its caches are handled
  as all others; if only one of the two engines has it, they are left out.

The descriptions come from vLLM's source. Tests write through the backend's own expressions and find
the same bytes through the layout, in each order that vLLM offers with the backend. The kernels
themselves were run on CPUs only.

LoRA adapters change no layout, so every cache that is covered is covered with adapters, too. Real
engines (Llama, tensor parallelism 1 and 2 on prefill, with prefix caching) hand over requests with
adapters in `tests/engines/test_lora_live.py`: the same adapter, others, and adapters that
are replaced at run time.
"""

KINDS = """\
## Kinds of cache

vLLM's `KVCacheSpec` classes: `kvferry/integrations/vllm/caches/cache_specs.py`.

A **paged** cache is handled by its attention backend, a **state** by its own backend (both below),
and **members** by the spec of each layer. A *hole* is a position without a page.

A **ring** has the entry of token t in slot t modulo its capacity. It is right after one number of
tokens only, as a state is, so decode computes a prompt's last token itself. A ring moves as a
whole, and its capacity depends on `num_speculative_tokens`: engines whose rings differ in capacity
are refused at the handshake. In an order that begins with L, vLLM would enlarge rings with its
blocks, but these models have caches that only offer orders that begin with B.

Where a sliding window has *bounded replay* (`swa_bounded_replay`), vLLM computes the window again
after a prefix-cache hit, but not after a load, which fills it.

Rings and bounded replay (DeepSeek V4.1, Qwen4-Exp, GLM-5-Next) were proven as data only: vLLM's
scheduler and allocator with this connector, with compressed entries and opaque indexers in other
groups, between engines of other parallelism and block size (`tests/vllm/geometry`). No
engine of these models was run: vLLM has their kernels for GPUs only.
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


ARCHITECTURES = """\
## Architectures

All {total} that vLLM {version} registers. The caches of an architecture are those that vLLM's
source can build for it on NVIDIA's GPUs; which of them an engine builds depends on the checkpoint
and the settings. *Keys and values* have sliding windows in some models; *latents* are those of MLA,
and the entries of indexers and compressors. The verdicts are explained [at the top of this
page](#which-of-vllms-caches-are-covered).
"""


def written() -> str:
    """The page."""
    import vllm

    version = vllm.__version__.partition("+")[0]
    found = architectures.architectures()
    introduction = INTRODUCTION.format(
        command=COMMAND,
        version=version,
        counts=_table(("verdict", "architectures"), _counts(found)),
    )
    parts = (
        introduction,
        KINDS,
        _table(("spec", "handling", "why"), _kinds()),
        MEDIA,
        BACKENDS,
        _table(("backend", "orders", "verdict", "a page holds", "opaque where"), _backends()),
        RECURRENT,
        _table(("backend", "verdict", "a page holds"), _states()),
        ARCHITECTURES.format(total=len(found), version=version),
        _table(("architecture", "verdict", "caches", "how or why"), _architectures(found)),
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


def _counts(found: Sequence[architectures.Architecture]) -> Iterator[Sequence[str]]:
    counted = Counter(each.verdict[0] for each in found)
    for verdict, count in sorted(counted.items(), key=lambda item: VERDICTS.index(item[0])):
        yield verdict, str(count)


def _architectures(found: Sequence[architectures.Architecture]) -> Iterator[Sequence[str]]:
    for each in found:
        verdict, why = each.verdict
        yield f"`{each.name}`", verdict, each.caches, why


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
