"""Prompts with images, between real engines of a model that takes images."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import media, probes
from tests.engines.conversations import COMPUTED, RECOMPUTE, ROLE, TWO_WAY, words
from tests.engines.engines import PREFILL, Engine, EngineError
from tests.engines.families import FULL, IMAGE, SLIDING, WINDOW
from tests.engines.fleet import fleet
from tests.engines.media import Prompt
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import PULLED, eventually, pulled

pytestmark = pytest.mark.timeout(300)

OTHER_PROMPT = "made for another prompt"

_seeds = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Engines of one model."""

    chunking: Engine  # caches prefixes, and computes a prompt with an image in several steps
    plain: Engine  # does neither, and has larger blocks; leads conversations
    # two ranks that cache prefixes, and compute what they cannot load; leads conversations
    two: Engine
    # loads with any ticket. Without a ticket, it is an ordinary engine, which the others must agree
    # with.
    believing: Engine


@pytest.fixture(scope="module")
def world(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    caching: dict[str, Any] = {"enable_prefix_caching": True}
    talking: dict[str, Any] = {"extra": TWO_WAY, "transfer": RECOMPUTE}
    with fleet(checkpoints["idefics3"], tmp_path_factory.mktemp("media")) as engines:
        started = World(
            chunking=engines.launch("chunking", "kv_both", max_num_batched_tokens=48, **caching),
            plain=engines.launch("plain", ROLE, **talking, block_size=64),
            two=engines.launch("two", ROLE, **talking, **caching, tensor_parallel_size=2),
            believing=engines.launch("believing", "kv_consumer", extra={"verify_prompt": False}),
        )
        engines.wait_started()
        yield started


@pytest.fixture(scope="module")
def windows(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, ...]]:
    """Two engines of a model with sliding windows in half of its layers.

    The last token of a prompt is left to the engine that decodes.
    """
    layers = {"layer_types": [SLIDING, FULL] * 2, "sliding_window": WINDOW}
    folder = tmp_path_factory.mktemp("media_windows")
    overrides = {"text_config": layers}
    with fleet(checkpoints["idefics3"], folder, hf_overrides=overrides) as engines:
        started = (
            engines.launch("prefill", "kv_producer"),
            engines.launch("decode", "kv_consumer"),
        )
        engines.wait_started()
        yield started


def with_image(*images: int, before: int = 20, after: int = 9, **options: Any) -> Prompt:
    """Text, images in a row, and text."""
    ids = [*prompt(before, seed=80), *[IMAGE] * len(images), *prompt(after, seed=81)]
    return Prompt(ids=ids, images=images, options=options)


def fresh_prompts() -> list[Prompt]:
    """Images at all places; no two calls return prompts with a common prefix of a block's size."""
    seed = next(_seeds) * 1000
    text = [prompt(40, seed + number) for number in range(8)]
    return [
        Prompt(ids=text[0]),
        Prompt(ids=[IMAGE, *text[1]], images=[seed]),
        Prompt(ids=[*text[2], IMAGE, *text[2]], images=[seed + 1]),
        Prompt(ids=[*text[3], IMAGE], images=[seed + 2]),
        Prompt(ids=[IMAGE], images=[seed + 3]),
        Prompt(
            ids=[*text[4], IMAGE, *text[5][:3], IMAGE, IMAGE, *text[5]],
            images=[seed + 4, seed + 5, seed + 4],
        ),
        Prompt(ids=[*text[6], IMAGE, *text[7]], images=[seed + 6]),
        Prompt(ids=[*text[6], IMAGE, *text[7]], images=[seed + 7]),
    ]


@pytest.mark.parametrize(
    ("source", "target"), [("chunking", "two"), ("plain", "chunking"), ("two", "plain")]
)
def test_images(world: World, source: str, target: str) -> None:
    """Every token of every prompt comes from the other engine, and the answers are equal."""
    prefill, decode = getattr(world, source), getattr(world, target)
    rest, prompts = at_rest(prefill, decode), fresh_prompts()
    got, counters = media.hand_over(prefill, decode, *prompts)
    expected = media.tokens(world.believing, *prompts)
    assert got == expected
    assert len({tuple(each) for each in expected}) == len(prompts)
    assert pulled(counters) == sum(each.tokens for each in prompts)
    assert counters["vllm:kvferry_loads"] == len(prompts)
    eventually(lambda: all(each.run(probes.reset_prefix_cache) for each in (prefill, decode)))
    come_to(rest, prefill, decode)


def test_cached_images(world: World) -> None:
    """Pages that were loaded for one image answer no later prompt with another image."""
    prefill, decode = world.plain, world.two
    loaded, unlike = with_image(100, after=12), with_image(101, after=12)
    media.hand_over(prefill, decode, loaded)
    again, counters = media.hand_over(prefill, decode, loaded, unlike)
    assert again == media.tokens(world.believing, loaded, unlike)
    assert pulled(counters) == loaded.tokens % 32 + unlike.tokens  # the first block has an image
    assert media.tokens(decode, loaded, unlike) == again


def test_another_image_is_refused(world: World) -> None:
    prefill, decode = world.plain, world.chunking
    [ticket] = media.prefill(prefill, with_image(102))
    others = (
        with_image(103),
        with_image(102, before=21, after=8),
        with_image(102, mm_processor_kwargs={"do_normalize": False}),
        with_image(102, media_io_kwargs={"image": {"image_mode": "L"}}),
    )
    for other in others:
        before = decode.log().count(OTHER_PROMPT)
        [completion] = media.answers(decode, other, params=ticket)
        assert completion.finish_reason == "error"
        assert decode.log().count(OTHER_PROMPT) == before + 1
    assert media.tokens(decode, *others) == media.tokens(world.believing, *others)


def test_swapped_images(world: World) -> None:
    """The control: an engine that does not compare prompts answers for the other image."""
    asked, other = with_image(104), with_image(105)
    right, wrong = media.tokens(world.believing, asked, other)
    [completion] = media.answers(world.believing, asked, params=media.prefill(world.plain, other))
    assert completion.tokens == wrong != right


def named(image: int, name: str) -> Prompt:
    """A prompt whose image has a name that the client chose."""
    return with_image(image, multi_modal_uuids={"image": [name]})


def test_one_name_for_two_images(world: World) -> None:
    """vLLM takes a client's name for an image's content, and so does a ticket.

    A client that gives two images one name gets the first image's answer for both, from one
    ordinary engine as from two. Prompts whose images have no such name are answered as always.
    """
    first, second = named(107, "name"), named(108, "name")
    [right], [wrong] = media.tokens(world.believing, first), media.tokens(world.believing, second)
    assert right == wrong
    [expected] = media.tokens(world.believing, with_image(108))
    assert expected != right
    [completion] = media.answers(world.chunking, second, params=media.prefill(world.plain, first))
    assert completion.tokens == right
    unnamed = with_image(108)
    got, _ = media.hand_over(world.plain, world.chunking, unnamed)
    assert got == [expected] == media.tokens(world.chunking, unnamed)


def test_image_that_cannot_be_processed(world: World) -> None:
    """Decode lacks the data of a named image, or neither engine can read an image."""
    good = named(110, "seen on prefill")
    [ticket] = media.prefill(world.plain, good)
    missing: dict[str, Any] = {"multi_modal_data": {"image": [None]}}
    unseen = Prompt(ids=good.ids, options=good.options | missing)
    with pytest.raises(EngineError):
        media.answers(world.chunking, unseen, params=ticket)
    garbage = Prompt(ids=good.ids, options={"multi_modal_data": {"image": ["no image"]}})
    for engine, params in ((world.plain, PREFILL), (world.chunking, ticket)):
        with pytest.raises(EngineError):
            media.answers(engine, garbage, params=params)
    got, _ = media.hand_over(world.plain, world.chunking, good)
    assert got == media.tokens(world.believing, with_image(110))


def test_windows(windows: tuple[Engine, ...]) -> None:
    """A prompt that ends with an image gets no ticket, and decode computes the whole prompt."""
    prefill, decode = windows
    prompts = fresh_prompts()
    ends = [each for each in prompts if each.ids[-1] == IMAGE]
    before = prefill.run(probes.metrics)
    got, counters = media.hand_over(prefill, decode, *prompts)
    assert got == media.tokens(prefill, *prompts)
    handed_over = [each.tokens - 1 for each in prompts if each not in ends]
    assert pulled(counters) == sum(handed_over)
    after = prefill.run(probes.metrics)
    name = "vllm:kvferry_tickets_not_made"
    assert after[name] - before.get(name, 0) == len(ends) == 2
    assert prefill.log().count("cause cut_media") == 1


@dataclass(kw_only=True)
class Talk:
    """A conversation with images; see ``conversations.Conversation``."""

    prefill: Engine
    decode: Engine
    ids: list[int] = field(default_factory=list)  # Token ids, with ``IMAGE`` where an image is
    images: list[int] = field(default_factory=list)  # The images' seeds
    ticket: dict[str, Any] | None = None  # The ``kv_transfer_params`` of decode's last answer

    @property
    def tokens(self) -> int:
        """How many tokens the conversation has, with those of its images."""
        return Prompt(ids=self.ids).tokens

    def say(self, ordinary: Engine, ids: list[int], *images: int) -> tuple[int, int]:
        """Lead a turn, and compare its answer with an ordinary engine's.

        Returns:
            How many tokens prefill computed, and how many it pulled.
        """
        prompt = Prompt(ids=[*self.ids, *ids], images=[*self.images, *images])
        before = self.prefill.run(probes.metrics)
        [prefilled] = media.answers(
            self.prefill, prompt, params=self.ticket or PREFILL, max_tokens=1
        )
        after = self.prefill.run(probes.metrics)
        [answer] = media.answers(self.decode, prompt, params=prefilled.params)
        assert [answer.tokens] == media.tokens(ordinary, prompt)
        self.ids, self.images = [*prompt.ids, *answer.tokens], [*prompt.images]
        self.ticket = answer.params
        computed, pulled = (
            int(after.get(name, 0) - before.get(name, 0)) for name in (COMPUTED, PULLED)
        )
        return computed, pulled


@pytest.mark.parametrize(("asking", "answering"), [("plain", "two"), ("two", "plain")])
def test_turns_with_images(world: World, asking: str, answering: str) -> None:
    """An image in the first turn, none in the second, another one in the third.

    What ``two`` has cached of the prompt before, in blocks of 32 tokens, it does not pull.
    """
    prefill, decode = getattr(world, asking), getattr(world, answering)
    talk = Talk(prefill=prefill, decode=decode)
    said: list[tuple[list[int], list[int]]] = [
        ([*words(20), IMAGE, *words(9)], [1]),
        (words(30), []),
        ([IMAGE, *words(5)], [2]),
        (words(5), []),
    ]
    asked = 0
    for ids, images in said:
        known, new = talk.tokens, Prompt(ids=ids).tokens
        cached = asked // 32 * 32 if asking == "two" else 0
        expected = (new + bool(known), max(known - 1, 0) - cached)
        assert talk.say(world.believing, ids, *images) == expected
        asked = known + new
    eventually(lambda: decode.run(probes.reset_prefix_cache))


def test_another_image_of_a_turn(world: World) -> None:
    """The client replaces the image of the first turn: the blocks before the image are pulled."""
    talk = Talk(prefill=world.plain, decode=world.two)
    talk.say(world.believing, [*words(40), IMAGE, *words(9)], 3)
    talk.images = [4]
    whole = talk.tokens + 30
    assert talk.say(world.believing, words(30)) == (whole - 32, 32)
