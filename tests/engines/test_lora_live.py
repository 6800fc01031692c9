"""Requests with LoRA adapters, between real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.conversations import Conversation, check_turns
from tests.engines.early import Legs, early_loads
from tests.engines.fleet import DECODES, PREFILLS, TALKS, Engines, cast
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
    # Without a ticket, it is what the others must agree with.
    ordinary=TALKS,
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
        "other": lora(second, number=12),
    }


Adapters = dict[str | None, Adapter]


def test_hand_over(engines: Engines, adapters: Adapters) -> None:
    """The prompt is pulled whole, and the text is the adapter's. Both of two ranks report it."""
    asked, adapter, ordinary = prompt(100, seed=60), adapters["first"], engines["ordinary"]
    [got] = check_hand_over(
        ordinary, engines["ranks"], engines["decode"], asked, max_tokens=12, lora=adapter
    )
    assert got.text != texts(ordinary, asked, max_tokens=12)[0]
    engines["decode"].run(probes.forget_prefixes)


@pytest.mark.parametrize(("there", "here"), [("first", None), (None, "first"), ("first", "other")])
def test_another_adapter_is_refused(
    engines: Engines, adapters: Adapters, there: str | None, here: str | None
) -> None:
    """None, or other weights under the same name."""
    asked = prompt(70, seed=62)
    [ticket] = engines["prefill"].prefill(asked, lora=adapters[there])
    check_refused(engines["decode"], asked, ticket, ANOTHER_PROMPT, lora=adapters[here])


@pytest.mark.parametrize("name", ["first", None])
def test_early_hand_over(engines: Engines, adapters: Adapters, name: str | None) -> None:
    """A ticket with an adapter may be revoked, so it comes at the end; others have parts."""
    prefill, decode, asked = engines["prefill"], engines["decode"], prompt(300, seed=90)
    begun, options = early_loads(decode), {"lora": adapters[name], "max_tokens": 12}
    legs = Legs(prefill, decode, asked, there={"lora": adapters[name]}, **options)
    with prefill.paused():
        legs.begin_prefill()
        legs.begin_decode()
        prefill.step(3)
        if name is None:
            legs.wait_begun()
    assert legs.texts() == texts(engines["ordinary"], asked, **options)
    assert early_loads(decode) == begun + (name is None)


def test_turns(engines: Engines, tmp_path: Path) -> None:
    """Prefill, of two ranks, pulls what decode has computed with the adapter."""
    adapter = lora(write_adapter(tmp_path / "talking", seed=31), name="talking", number=31)
    talk = Conversation(
        prefill=engines["ranks"], decode=engines["ordinary"], options={"lora": adapter}
    )
    check_turns(engines["decode"], talk, 32)
