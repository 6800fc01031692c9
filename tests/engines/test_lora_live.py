"""Requests with LoRA adapters, between real engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.conversations import (
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    Conversation,
    check_turns,
    edited_histories,
    same_answer,
    words,
)
from tests.engines.early import Legs, early_loads, status
from tests.engines.engines import PREFILL, Engine
from tests.engines.fleet import fleet
from tests.engines.lora import RANK, load, lora, write_adapter
from tests.engines.messages import Completion
from tests.engines.ranks import come_to, left_alone
from tests.engines.steps import eventually, pulled_by

pytestmark = pytest.mark.timeout(300)

OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "enable_prefix_caching": True,
    "max_cpu_loras": 4,
    "max_lora_rank": RANK,
    "max_loras": 2,
}
CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Two engines that prefill, ``ranks`` with two ranks, ``prefill`` in chunks; two that decode.

    ``believing`` accepts any ticket. Without a ticket, it is an ordinary engine, which the others
    must agree with. ``ranks`` and ``believing`` lead conversations, too.
    """

    prefill: Engine
    ranks: Engine
    decode: Engine
    believing: Engine


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    ahead: dict[str, Any] = {
        "async_scheduling": True
    }  # as on a GPU: steps are built before the last one's report
    talking: dict[str, Any] = {"transfer": RECOMPUTE, "extra": TWO_WAY}
    believing = talking | {"extra": TWO_WAY | {"verify_prompt": False}}
    with fleet(checkpoint, tmp_path_factory.mktemp("lora"), **OPTIONS) as started:
        found = Engines(
            prefill=started.launch("prefill", "kv_producer", max_num_batched_tokens=CHUNK, **ahead),
            ranks=started.launch("ranks", ROLE, **talking, tensor_parallel_size=2),
            decode=started.launch("decode", "kv_consumer", {"load_timeout": 20.0}, **ahead),
            believing=started.launch("believing", ROLE, **believing),
        )
        started.wait_started()
        yield found


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "first", seed=1)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "second", seed=2)


Adapter = dict[str, Any] | None


def text(engine: Engine, asked: list[int], adapter: Adapter) -> str:
    [completion] = engine.generate(asked, max_tokens=12, lora=adapter)
    return completion.text


def handed_over(
    prefill: Engine, decode: Engine, asked: list[int], there: Adapter, here: Adapter
) -> Completion:
    """Prefill with one adapter and decode with another, or the same."""
    tickets = prefill.prefill(asked, lora=there)
    assert "kvferry" in tickets[0], prefill.log()[-3000:]
    [completion] = decode.generate(asked, params=tickets, max_tokens=12, lora=here)
    return completion


def pulls(engines: Engines, asked: list[int], there: Adapter, here: Adapter) -> str:
    """Hand over, see that the whole prompt was pulled, and return the text."""
    before = pulled_by(engines.decode)
    completion = handed_over(engines.prefill, engines.decode, asked, there, here)
    assert completion.finish_reason == "length", engines.decode.log()[-3000:]
    assert pulled_by(engines.decode) - before == len(asked)
    return completion.text


def refused(engines: Engines, asked: list[int], there: Adapter, here: Adapter, why: str) -> None:
    """Hand over, and see that decode refuses the ticket."""
    before = engines.decode.log().count(why)
    completion = handed_over(engines.prefill, engines.decode, asked, there, here)
    assert completion.finish_reason == "error"
    assert engines.decode.log().count(why) == before + 1


def not_made(engine: Engine) -> float:
    """How many requests got no ticket because of their adapter."""
    name = 'tickets_not_made_total{driver="loopback",reason="adapter"}'
    count: float = engine.run(probes.exposed)[name]
    return count


ANOTHER_PROMPT = "made for another prompt"


def test_hand_over(engines: Engines, first: Path) -> None:
    """The prompt is pulled whole, and the text is the adapter's."""
    asked, adapter = prompt(100, seed=60), lora(first)
    expected = text(engines.believing, asked, adapter)
    assert pulls(engines, asked, adapter, adapter) == expected
    assert expected != text(engines.believing, asked, None)


@pytest.fixture
def adapters(first: Path, second: Path) -> dict[str | None, Adapter]:
    """What a request may have on either side; "other" has the name of "first"."""
    return {
        None: None,
        "first": lora(first),
        "second": lora(second, name="second", number=2),
        "other": lora(second, number=12),
    }


others = pytest.mark.parametrize(
    ("there", "here"), [("first", "second"), ("first", None), (None, "first"), ("first", "other")]
)


@others
def test_another_adapter_is_refused(
    engines: Engines,
    adapters: dict[str | None, Adapter],
    there: str | None,
    here: str | None,
) -> None:
    """Another name, none, or other weights under the same name."""
    asked = prompt(70, seed=62)
    refused(engines, asked, adapters[there], adapters[here], ANOTHER_PROMPT)


def test_an_engine_that_believes_answers_otherwise(
    engines: Engines, first: Path, second: Path
) -> None:
    """The control: with the pages of other weights, the text is not that of the adapter."""
    asked, here = prompt(100, seed=63), lora(second, number=12)
    wrong = handed_over(engines.prefill, engines.believing, asked, lora(first), here)
    assert wrong.finish_reason == "length"
    assert wrong.text != text(engines.believing, asked, lora(second, name="second", number=2))


def test_two_adapters_at_once(engines: Engines, first: Path, second: Path) -> None:
    """Prompts with either adapter in the same steps.

    None without an adapter: vLLM's CPU build answers those with another text in such a step.
    """
    adapters: list[Adapter] = [lora(first), lora(second, name="second", number=2)]
    asked = [prompt(60, seed=70 + number) for number in range(4)]
    before = pulled_by(engines.decode)
    prefilling = [
        engines.prefill.submit(*asked, max_tokens=1, params=PREFILL, lora=adapter)
        for adapter in adapters
    ]
    decoding = []
    for adapter, ids in zip(adapters, prefilling, strict=True):
        tickets = [each.params for each in engines.prefill.results(ids)]
        decoding.append(engines.decode.submit(*asked, max_tokens=12, params=tickets, lora=adapter))
    for adapter, ids in zip(adapters, decoding, strict=True):
        got = [each.text for each in engines.decode.results(ids)]
        expected = engines.believing.generate(*asked, max_tokens=12, lora=adapter)
        assert got == [each.text for each in expected]
    assert pulled_by(engines.decode) - before == 2 * 4 * 60


def test_weights_replaced_at_run_time(engines: Engines, tmp_path: Path) -> None:
    """The same name and number, loaded again from a new path; one engine after the other.

    As in vLLM's server, later requests say ``load_inplace``, too: each step loads the files again.
    """
    old = lora(write_adapter(tmp_path / "old", seed=3), name="moving", number=3)
    new = lora(write_adapter(tmp_path / "new", seed=4), name="moving", number=3, load_inplace=True)
    for engine in (engines.prefill, engines.decode, engines.believing):
        engine.run(load, old)
    asked = prompt(80, seed=64)
    assert pulls(engines, asked, old, old) == text(engines.believing, asked, old)
    engines.decode.run(load, new)
    refused(engines, prompt(80, seed=65), old, new, ANOTHER_PROMPT)
    engines.prefill.run(load, new)
    engines.believing.run(load, new)
    asked = prompt(80, seed=66)
    assert pulls(engines, asked, new, new) == text(engines.believing, asked, new)


def test_files_that_changed_after_they_were_loaded(engines: Engines, tmp_path: Path) -> None:
    """The engines still compute with the old weights, so the new files stand for nothing."""
    there = lora(write_adapter(tmp_path / "there", seed=5), name="changing", number=5)
    here = lora(write_adapter(tmp_path / "here", seed=5), name="changing", number=5)
    for engine, adapter in ((engines.prefill, there), (engines.decode, here)):
        engine.run(load, adapter)
    tickets = engines.prefill.prefill(prompt(50, seed=67), lora=there)
    write_adapter(tmp_path / "here", seed=6)
    [completion] = engines.decode.generate(prompt(50, seed=67), params=tickets, lora=here)
    assert completion.finish_reason == "error"
    assert "adapter 'changing': its files" in engines.decode.log()
    write_adapter(tmp_path / "there", seed=6)
    before = not_made(engines.prefill)
    [ticket] = engines.prefill.prefill(prompt(50, seed=68), lora=there)
    assert "kvferry" not in ticket
    assert not_made(engines.prefill) == before + 1
    # Loaded again, the new weights count, but not where blocks of the old ones may be cached.
    engines.prefill.run(load, {**there, "load_inplace": True})
    [ticket] = engines.prefill.prefill(prompt(50, seed=69), lora=there)
    assert "kvferry" not in ticket
    assert "vLLM keeps blocks of those in its prefix cache" in engines.prefill.log()


def test_files_that_are_replaced_before_decode_loads_them(engines: Engines, tmp_path: Path) -> None:
    """Decode has checked the ticket, and loads the adapter in the step that computes with it."""
    asked, decode = prompt(100, seed=85), engines.decode
    here = lora(write_adapter(tmp_path / "here", seed=21), name="late", number=41)
    there = lora(write_adapter(tmp_path / "there", seed=21), name="late", number=41)
    tickets = engines.prefill.prefill(asked, lora=there)
    rest = left_alone(decode)
    with decode.paused():
        ids = decode.submit(asked, params=tickets, max_tokens=12, lora=here)

        def loads() -> bool:
            decode.step()
            return bool(decode.run(status, ids[0]) == "WAITING_FOR_REMOTE_KVS")

        eventually(loads)
        write_adapter(tmp_path / "here", seed=22)
    [completion] = decode.results(ids)
    assert (completion.finish_reason, completion.text) == ("error", "")
    assert "adapter late was loaded with other weights than its ticket is for" in decode.log()
    expected = lora(write_adapter(tmp_path / "new", seed=22), name="new", number=42)
    assert text(decode, asked, here) == text(engines.believing, asked, expected)
    come_to(rest, decode)


def test_two_ranks(engines: Engines, first: Path) -> None:
    """Both report what they loaded."""
    asked, adapter = prompt(90, seed=82), lora(first)
    completion = handed_over(engines.ranks, engines.decode, asked, adapter, adapter)
    assert completion.text == text(engines.believing, asked, adapter)


def test_weights_replaced_under_a_request(engines: Engines, first: Path, tmp_path: Path) -> None:
    """An adapter is replaced, but the next request still has the old path.

    The workers report the load with the request's only step, after the ticket was made, so the
    ticket is given up.
    """
    old, asked = lora(first), prompt(90, seed=83)
    new = lora(write_adapter(tmp_path / "new", seed=9), load_inplace=True)
    engines.ranks.prefill(prompt(90, seed=84), lora=old)
    with engines.ranks.paused():  # no step in which the load would be reported before
        engines.ranks.run(load, new)
        ids = engines.ranks.submit(asked, max_tokens=1, params=PREFILL, lora=old)
    tickets = [each.params for each in engines.ranks.results(ids)]
    [completion] = engines.decode.generate(asked, params=tickets, max_tokens=12, lora=old)
    assert completion.finish_reason == "error"
    assert "was loaded with other weights than its ticket is for" in engines.ranks.log()
    assert "cause stale" in engines.decode.log()
    # vLLM has cached the blocks of that request under the old path, so this path stays refused.
    engines.ranks.run(load, {**old, "load_inplace": True})
    [ticket] = engines.ranks.prefill(asked, lora=old)
    assert "kvferry" not in ticket
    assert "vLLM keeps blocks of those in its prefix cache" in engines.ranks.log()


def early_legs(engines: Engines, asked: list[int], there: Adapter, here: Adapter) -> Legs:
    """Both legs of a request, with one adapter on prefill and another on decode, or the same."""
    legs = Legs(
        engines.prefill, engines.decode, asked, there={"lora": there}, lora=here, max_tokens=12
    )
    legs.begin_prefill()
    legs.begin_decode()
    return legs


def test_early_hand_over(engines: Engines, first: Path) -> None:
    """A ticket with an adapter may be revoked, so it comes at the end; others have parts."""
    rest = left_alone(engines.prefill, engines.decode)
    for adapter, begun in ((lora(first), 0), (None, 1)):
        for length in (CHUNK, 300):
            asked = prompt(length, seed=90)
            before = pulled_by(engines.decode), early_loads(engines.decode)
            with engines.prefill.paused():
                legs = early_legs(engines, asked, adapter, adapter)
                engines.prefill.step(3)
                if adapter is None and length == 300:
                    legs.wait_begun()
            assert legs.texts() == [text(engines.believing, asked, adapter)]
            after = pulled_by(engines.decode), early_loads(engines.decode)
            assert after == (before[0] + length, before[1] + begun * (length == 300))
    come_to(rest, engines.prefill, engines.decode)


def test_early_parts_for_another_adapter_are_refused(
    engines: Engines, adapters: dict[str | None, Adapter]
) -> None:
    check_other_adapter(engines, adapters, "first", "other")


def check_other_adapter(
    engines: Engines, adapters: dict[str | None, Adapter], there: str, here: str
) -> None:
    """A room is for one prompt with one adapter: no part comes, or one that does not fit."""
    rest, before = left_alone(engines.decode), len(engines.decode.log())
    with engines.prefill.paused():
        asked = prompt(300, seed=91)
        legs = early_legs(engines, asked, adapters[there], adapters[here])
        engines.prefill.step(6)
        assert legs.decoded() == [""]
    said = engines.decode.log()[before:]
    assert said.count(ANOTHER_PROMPT) + said.count("no request with this transfer_id and") == 1
    engines.prefill.results(legs.there)
    come_to(rest, engines.decode)


def test_early_request_whose_prefill_makes_no_ticket(engines: Engines, tmp_path: Path) -> None:
    """Decode hears so at once, and prefill holds nothing."""
    adapter = lora(write_adapter(tmp_path / "early", seed=10), name="early", number=20)
    for engine in (engines.prefill, engines.decode):
        engine.run(load, adapter)
    rest = left_alone(engines.prefill, engines.decode)
    with engines.prefill.paused():
        legs = early_legs(engines, prompt(150, seed=92), adapter, adapter)
        engines.prefill.step(2)
        write_adapter(tmp_path / "early", seed=11)
    assert legs.texts() == [""]
    come_to(rest, engines.prefill, engines.decode)


def conversation_with(engines: Engines, path: Path, number: int) -> Conversation:
    adapter = lora(write_adapter(path, seed=number), name=path.name, number=number)
    return Conversation(prefill=engines.ranks, decode=engines.believing, options={"lora": adapter})


def test_turns(engines: Engines, tmp_path: Path) -> None:
    """Prefill, of two ranks, pulls what decode has computed with the adapter."""
    conversation = conversation_with(engines, tmp_path / "talking", 31)
    check_turns(engines.decode, conversation, block=32)


def test_the_next_turn_has_another_adapter(engines: Engines, second: Path, tmp_path: Path) -> None:
    """Nothing of the conversation is of use: all is computed with the new weights."""
    prefill, ordinary = engines.ranks, engines.decode
    conversation = conversation_with(engines, tmp_path / "changing", 32)
    conversation.say(words(40), max_tokens=30)
    before = edited_histories(prefill)
    for adapter in (lora(second, name="second", number=2), None):
        conversation.options = {"lora": adapter}
        turn = conversation.say(words(30), max_tokens=12)
        assert same_answer(ordinary, turn, max_tokens=12, lora=adapter)
        assert (turn.computed, turn.pulled) == (len(turn.prompt), 0)
    conversation.end()
    eventually(lambda: edited_histories(prefill) == before + 2)
