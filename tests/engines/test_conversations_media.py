"""Conversations with images in some turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engines import media, probes
from tests.engines.conversations import (
    COMPUTED,
    RECOMPUTE,
    ROLE,
    TWO_WAY,
    idle,
    words,
)
from tests.engines.engines import PREFILL, Engine
from tests.engines.families import IMAGE, IMAGE_TOKENS
from tests.engines.fleet import fleet
from tests.engines.media import Prompt
from tests.engines.steps import PULLED, eventually

pytestmark = pytest.mark.timeout(300)


@dataclass(kw_only=True)
class Talk:
    """A conversation with images; see ``conversations.Conversation``.

    Attributes:
        prefill, decode: The engines.
        ids: Token ids, with ``IMAGE`` where an image is.
        images: The images' seeds.
        ticket: The ``kv_transfer_params`` of decode's last answer.
    """

    prefill: Engine
    decode: Engine
    ids: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    ticket: dict[str, Any] | None = None

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


@pytest.fixture(scope="module")
def engines(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine, Engine]]:
    """An ordinary engine, and two that prefill and decode; the last computes prompts in chunks."""
    options: dict[str, Any] = {"extra": TWO_WAY, "transfer": RECOMPUTE}
    with fleet(checkpoints["idefics3"], tmp_path_factory.mktemp("talk")) as started:
        found = (
            started.launch("ordinary"),
            started.launch("one", ROLE, block_size=64, **options),
            started.launch("two", ROLE, max_num_batched_tokens=48, **options),
        )
        started.wait_started()
        yield found


@pytest.mark.parametrize("turned", [False, True])
def test_images(engines: tuple[Engine, Engine, Engine], turned: bool) -> None:
    """An image in the first turn, none in the second, another one in the third."""
    ordinary, *pair = engines
    prefill, decode = reversed(pair) if turned else pair
    free = idle(prefill, decode)
    talk = Talk(prefill=prefill, decode=decode)
    assert talk.say(ordinary, [*words(20), IMAGE, *words(9)], 1) == (29 + IMAGE_TOKENS, 0)
    known = talk.tokens
    assert talk.say(ordinary, words(30)) == (31, known - 1)
    known = talk.tokens
    assert talk.say(ordinary, [IMAGE, *words(5)], 2) == (6 + IMAGE_TOKENS, known - 1)
    known = talk.tokens
    assert talk.say(ordinary, words(5)) == (6, known - 1)
    eventually(lambda: decode.run(probes.reset_prefix_cache))
    assert idle(prefill, decode) == free


def test_another_image(engines: tuple[Engine, Engine, Engine]) -> None:
    """The client replaces the image of the first turn: the blocks before the image are pulled."""
    ordinary, prefill, decode = engines
    talk = Talk(prefill=prefill, decode=decode)
    talk.say(ordinary, [*words(40), IMAGE, *words(9)], 3)
    talk.images = [4]
    whole = talk.tokens + 30
    assert talk.say(ordinary, words(30)) == (whole - 32, 32)


def test_history_that_changed_in_an_image(engines: tuple[Engine, Engine, Engine]) -> None:
    """Where a digest's block ends in an image that is common, the whole image is computed again.

    The tokens of an image may attend to each other in both directions.
    """
    ordinary, prefill, decode = engines
    talk = Talk(prefill=prefill, decode=decode)
    talk.say(ordinary, [*words(40), IMAGE, *words(9)], 5)
    talk.ids[45] = (talk.ids[45] + 1) % 512
    whole = talk.tokens + 30
    # Blocks up to 96 are common, and the image has the tokens 40 to 106.
    assert talk.say(ordinary, words(30)) == (whole - 32, 32)
