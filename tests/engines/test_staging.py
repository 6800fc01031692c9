"""What is special about engines that hand pages over by way of host memory.

``test_over_drivers.py`` has texts, and ``test_lifecycle.py`` aborts, leases and deaths.
"""

from __future__ import annotations

from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import contents, probes
from tests.engines.engines import PREFILL, Engine
from tests.engines.fleet import DECODES, PREFILLS, Engines, cast
from tests.engines.steps import check_decoded, idle_blocks, texts
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

PAGE_BYTES = 32 * 4 * 2 * 2 * 32 * 4
"""Of a block of 32 tokens of the Llama: layers, K and V, heads, elements, float32."""
FEW_PAGES = 24

STAGED: dict[str, Any] = {"extra": {"staging": True}}
# The hole is not included in the number of pages.
NARROW: dict[str, Any] = {
    "extra": {
        "staging": True,
        "staging_bytes": (1 + FEW_PAGES) * PAGE_BYTES,
        "staging_timeout": 60.0,
    }
}
engines = cast(
    prefill=PREFILLS | STAGED,
    decode=DECODES | STAGED,
    narrow_prefill=PREFILLS | NARROW,
    narrow_decode=DECODES | NARROW,
)


def test_blocks_are_free_when_they_are_copied(reference: Engine, engines: Engines) -> None:
    """Long before anybody has read the host pages; and other prompts may use the blocks."""
    prefill, decode = engines["prefill"], engines["decode"]
    free = idle_blocks(prefill)
    prompts = [prompt(length, seed=53) for length in (100, 300)]
    tickets = prefill.prefill(*prompts)
    eventually(lambda: prefill.run(probes.free_blocks) == free)
    assert prefill.run(probes.statuses) == []
    assert prefill.run(probes.host_pages)[0] == 4 + 10
    prefill.run(contents.fill, float("nan"))
    got = texts(decode, *prompts, params=tickets)
    prefill.run(contents.fill, 0.0)
    assert got == texts(reference, *prompts)


def test_a_full_pool_makes_requests_wait(reference: Engine, engines: Engines) -> None:
    """On both sides there is room for one or two prompts at a time, and all are handed over."""
    prefill, decode = engines["narrow_prefill"], engines["narrow_decode"]
    prompts = [prompt(300 + length, seed=57) for length in range(4)]
    ids = prefill.submit(*prompts, params=PREFILL, max_tokens=1)
    waiting = dict(zip(ids, prompts, strict=True))
    while waiting:
        eventually(lambda: prefill.run(probes.free_blocks) and bool(prefill.finished))
        for one in prefill.finished:
            [completion] = prefill.results([one])
            check_decoded(reference, decode, waiting.pop(one), completion.params)
    tickets = engines["prefill"].prefill(*prompts)
    assert texts(decode, *prompts, params=tickets) == texts(reference, *prompts)
