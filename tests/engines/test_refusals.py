"""What is refused, by name and with the remedy; no refused ticket ends an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import Engine, EngineError
from tests.engines.fixtures import StartEngine
from tests.engines.steps import hand_over, texts

pytestmark = pytest.mark.timeout(300)

Params = dict[str, Any]


def _own(key: str, value: object) -> Callable[[Params], None]:
    """Changes what stands under ``kvferry``."""
    return lambda params: params["kvferry"].update({key: value})


def _nixl(key: str, value: object) -> Callable[[Params], None]:
    """Changes what stands under one of NixlConnector's keys."""
    return lambda params: params.update({key: value})


ALTERED = "it was altered on its way"

FORGERIES: dict[str, tuple[Callable[[Params], Any], str]] = {
    "of another connector": (lambda p: p.pop("kvferry"), "another connector made it"),
    "of another incarnation": (_own("incarnation", "00000000000000ff"), "it was restarted since"),
    "with a negative block": (_nixl("remote_block_ids", [[1, 2, -3]]), "names block -3"),
    "with a hole": (_nixl("remote_block_ids", [[1, 0, 2]]), ALTERED),
    "with another digest": (_own("digest", "00" * 16), "for another prompt"),
    "of an engine that is not there": (
        lambda p: p.update(remote_engine_id="gone", remote_port=1),
        "nobody listens there",
    ),
}


def test_forged_tickets(reference: Engine, prefill: Engine, decode: Engine) -> None:
    """Each fails its own request, and no other; the genuine one is good after them."""
    [ticket] = prefill.prefill(prompt(70))
    for change, reason in FORGERIES.values():
        forged = copy.deepcopy(ticket)
        change(forged)
        [completion] = decode.generate(prompt(70), params=forged)
        assert completion.finish_reason == "error"
        assert completion.text == ""
        [line] = _lines(decode, completion.id, "WARNING")
        assert reason in line
    [completion] = decode.generate(prompt(70), params=ticket)
    assert completion.text == texts(reference, prompt(70))[0]


@pytest.fixture(scope="module")
def forgiving(start_engine: StartEngine) -> Engine:
    """Computes what it cannot load; it is both roles, and caches prefixes."""
    return start_engine(
        "forgiving",
        "kv_both",
        transfer={"kv_load_failure_policy": "recompute"},
        enable_prefix_caching=True,
    )


def test_ticket_of_this_very_engine(reference: Engine, forgiving: Engine) -> None:
    [completion] = forgiving.generate(prompt(71), params=forgiving.prefill(prompt(71)))
    assert completion.text == texts(reference, prompt(71))[0]
    [line] = _lines(forgiving, completion.id, "WARNING")
    assert "made by this very engine" in line


def test_refused_ticket_is_recomputed_where_the_policy_says_so(
    reference: Engine, prefill: Engine, forgiving: Engine
) -> None:
    before = forgiving.run(probes.metrics)
    prompts = [prompt(length, seed=1) for length in (33, 200)]
    tickets = prefill.prefill(*prompts)
    for ticket in tickets:
        ticket["kvferry"]["digest"] = "00" * 16
    completions = forgiving.generate(*prompts, params=tickets)
    assert [c.text for c in completions] == texts(reference, *prompts)
    after = forgiving.run(probes.metrics)
    name = "vllm:kvferry_refused_tickets"
    assert after[name] == before.get(name, 0) + 2
    assert hand_over(prefill, forgiving, prompt(90, seed=1))[0] == texts(
        reference, prompt(90, seed=1)
    )


def test_refused_ticket_where_nothing_was_to_be_pulled(
    reference: Engine, prefill: Engine, decode: Engine
) -> None:
    """A prompt whose log probabilities are wanted is computed here anyway."""
    [ticket] = prefill.prefill(prompt(50))
    ticket["kvferry"]["digest"] = "00" * 16
    [completion] = decode.generate(prompt(50), params=ticket, prompt_logprobs=1)
    assert completion.text == texts(reference, prompt(50))[0]
    assert _lines(decode, completion.id, "ticket refused")


def test_producer_does_not_load(reference: Engine, prefill: Engine, decode: Engine) -> None:
    [ticket] = prefill.prefill(prompt(40))
    [completion] = prefill.generate(prompt(40), params=ticket | {"remote_engine_id": "another"})
    assert completion.finish_reason == "error"
    assert 'set "kv_consumer" or "kv_both"' in _lines(prefill, completion.id, "WARNING")[0]
    assert hand_over(prefill, decode, prompt(40))[0] == texts(reference, prompt(40))


def test_one_line_at_start(prefill: Engine) -> None:
    [line] = [line for line in prefill.log().splitlines() if "serves engine" in line]
    for part in (
        "as kv_",
        "driver loopback",
        "not encrypted",
        "not signed",
        "memory cpu",
        "512 blocks of 32 tokens",
        "127.0.0.1 port",
    ):
        assert part in line


# What an engine refuses at start.


def test_refused_at_start(start_engine: StartEngine) -> None:
    with pytest.raises(EngineError, match="'cuda' and the cache is in 'cpu' memory"):
        start_engine("refused", "kv_both", transfer={"kv_buffer_device": "cuda"})


def _lines(engine: Engine, request_id: str, text: str) -> list[str]:
    """The lines of an engine's log about one request."""
    lines = engine.log().splitlines()
    return [line for line in lines if f"request {request_id}" in line and text in line]
