"""Requests with LoRA adapters, between real engines; ``test_lora_http.py`` replaces weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.conversations import Conversation, check_turns
from tests.engines.early import Legs, early_loads
from tests.engines.fleet import DECODES, PREFILLS, TALKS, TWO_WAY, Engines, cast
from tests.engines.lora import OPTIONS, lora, write_adapter
from tests.engines.steps import check_hand_over, check_refused, texts

pytestmark = pytest.mark.timeout(300)

CHUNK = 64
# As on a GPU: steps are built before the last one's report.
AHEAD: dict[str, Any] = {"async_scheduling": True}

engines = cast(
    "llama",
    OPTIONS,
    prefill=PREFILLS | AHEAD | {"max_num_batched_tokens": CHUNK},
    ranks=TALKS | {"tensor_parallel_size": 2},
    decode=DECODES | AHEAD | {"extra": {"load_timeout": 20.0}},
    # Accepts any ticket. Without one, it is what the others must agree with.
    believing=TALKS | {"extra": TWO_WAY | {"verify_prompt": False}},
)

Adapter = dict[str, Any] | None
ANOTHER_PROMPT = "made for another prompt"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Adapter]:
    """What a request may have on either side; "other" has the name of "first"."""
    folder = tmp_path_factory.mktemp("adapters")
    first, second = (write_adapter(folder / str(seed), seed=seed) for seed in (1, 2))
    return {
        None: None,
        "first": lora(first),
        "second": lora(second, name="second", number=2),
        "other": lora(second, number=12),
    }


Adapters = dict[str | None, Adapter]


@pytest.mark.parametrize("source", ["prefill", "ranks"])
def test_hand_over(engines: Engines, adapters: Adapters, source: str) -> None:
    """The prompt is pulled whole, and the text is the adapter's. Both of two ranks report it."""
    asked, adapter, believing = prompt(100, seed=60), adapters["first"], engines["believing"]
    [got] = check_hand_over(
        believing, engines[source], engines["decode"], asked, max_tokens=12, lora=adapter
    )
    assert got.text != texts(believing, asked, max_tokens=12)[0]
    engines["decode"].run(probes.forget_prefixes)


@pytest.mark.parametrize(
    ("there", "here"), [("first", "second"), ("first", None), (None, "first"), ("first", "other")]
)
def test_another_adapter_is_refused(
    engines: Engines, adapters: Adapters, there: str | None, here: str | None
) -> None:
    """Another name, none, or other weights under the same name."""
    asked = prompt(70, seed=62)
    [ticket] = engines["prefill"].prefill(asked, lora=adapters[there])
    check_refused(engines["decode"], asked, ticket, ANOTHER_PROMPT, lora=adapters[here])


def test_an_engine_that_believes_answers_otherwise(engines: Engines, adapters: Adapters) -> None:
    """The control: with the pages of other weights, the text is not that of the adapter."""
    asked, believing = prompt(100, seed=63), engines["believing"]
    tickets = engines["prefill"].prefill(asked, lora=adapters["first"])
    [wrong] = texts(believing, asked, params=tickets, max_tokens=12, lora=adapters["other"])
    assert wrong not in ("", *texts(believing, asked, max_tokens=12, lora=adapters["second"]))


def early_legs(engines: Engines, asked: list[int], there: Adapter, here: Adapter) -> Legs:
    """Both legs of a request, with one adapter on prefill and another on decode, or the same."""
    legs = Legs(
        engines["prefill"],
        engines["decode"],
        asked,
        there={"lora": there},
        lora=here,
        max_tokens=12,
    )
    legs.begin_prefill()
    legs.begin_decode()
    return legs


@pytest.mark.parametrize("name", ["first", None])
def test_early_hand_over(engines: Engines, adapters: Adapters, name: str | None) -> None:
    """A ticket with an adapter may be revoked, so it comes at the end; others have parts."""
    prefill, decode, asked = engines["prefill"], engines["decode"], prompt(300, seed=90)
    begun = early_loads(decode)
    with prefill.paused():
        legs = early_legs(engines, asked, adapters[name], adapters[name])
        prefill.step(3)
        if name is None:
            legs.wait_begun()
    expected = texts(engines["believing"], asked, max_tokens=12, lora=adapters[name])
    assert legs.texts() == expected
    assert early_loads(decode) == begun + (name is None)


def test_turns(engines: Engines, tmp_path: Path) -> None:
    """Prefill, of two ranks, pulls what decode has computed with the adapter."""
    adapter = lora(write_adapter(tmp_path / "talking", seed=31), name="talking", number=31)
    talk = Conversation(
        prefill=engines["ranks"], decode=engines["believing"], options={"lora": adapter}
    )
    check_turns(engines["decode"], talk, 32)
