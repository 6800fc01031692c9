"""Two engines of a model family, with unlike blocks, which hand over to each other in any way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.conversations import RECOMPUTE, ROLE, TWO_WAY, forget
from tests.engines.engines import Engine
from tests.engines.fixtures import AT_START
from tests.engines.fleet import fleet
from tests.engines.ranks import at_rest
from tests.engines.steps import eventually, hand_over, idle_blocks, pulled, texts

BF16 = {"dtype": "bfloat16"}
PLAIN_MLA = {"attention_backend": "CPU_MLA"}
"""On machines with AMX, vLLM takes another backend, which knows bfloat16 only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One of `families.FAMILIES`."""

    name: str  # its key
    left: int = 0  # prompt tokens that are left to the engine that decodes
    # tokens in a block where 32 are asked for, and where 64 are; the same where the model's kernels
    # decide
    blocks: tuple[int, int] = (32, 64)
    chunk: int = 64  # tokens that the second engine computes in a step; 0 for all that there are
    # an engine's text does not depend on how its tokens were computed: in a prompt or after it,
    # alone or with others
    steady: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # for its engines
    like: str = ""  # the family that keeps the same kinds of cache, if one does
    channels: tuple[int, ...] = ()  # of the parts of a convolution, on all ranks together
    copied: tuple[int, ...] = ()  # which of these parts each rank has whole


GEMMA = Family(name="gemma3", left=1)
GRANITE = Family(
    name="granite4", left=1, blocks=(96, 128), chunk=128, channels=(256, 32, 32), copied=(1, 2)
)
QWEN3_NEXT = Family(
    name="qwen3_next",
    left=1,
    blocks=(288, 320),
    chunk=0,
    steady=False,
    options=BF16,
    channels=(128, 128, 256),
)
DEEPSEEK = Family(name="deepseek", blocks=(16, 16), chunk=0, steady=False, options=PLAIN_MLA)
NEMOTRON = Family(
    name="nemotron_h",
    left=1,
    blocks=(96, 128),
    chunk=128,
    like="granite4",
    channels=(256, 64, 64),
)
ALL = (
    GEMMA,
    GRANITE,
    Family(name="mistral", left=1),
    QWEN3_NEXT,
    DEEPSEEK,
    Family(name="qwen3", like="llama"),
    Family(name="gpt_oss", left=1, like="gemma3"),
    NEMOTRON,
)
"""First those that are like no other one: pytest groups tests by the index of a family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Engines of a family, each of which prefills and decodes.

    Without ``kv_transfer_params`` they are what the hand-over must agree with."""

    family: Family  # whose
    one: Engine  # has the smaller blocks
    # has larger ones, if there is a choice; schedules asynchronously, and computes prompts in
    # chunks
    two: Engine

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.one, self.two

    def block(self, engine: Engine) -> int:
        """How many tokens a block of an engine has."""
        return self.family.blocks[engine is self.two]


def nearly_full(block: int) -> list[int]:
    """Prompts whose last block has room for two more tokens: the first block, or the third."""
    return [length for length in (block - 2, 3 * block - 2) if length < 400]


@contextmanager
def started(family: Family, model: Path, folder: Path, **extra: Any) -> Iterator[Pair]:
    """A pair that ends with the context; ``extra`` is in both ``kv_connector_extra_config``."""
    options: dict[str, Any] = {
        "extra": TWO_WAY | {"log_requests": True} | extra,
        "transfer": RECOMPUTE,
    }
    chunks: dict[str, Any] = {"max_num_batched_tokens": family.chunk} if family.chunk else {}
    with fleet(model, folder, **family.options) as engines:
        one = engines.launch("one", ROLE, **options)
        two = engines.launch("two", ROLE, **options, block_size=64, async_scheduling=True, **chunks)
        engines.wait_started()
        for engine in (one, two):
            [AT_START[engine.name]] = at_rest(engine)
        yield Pair(family=family, one=one, two=two)


@pytest.fixture(scope="module", params=ALL, ids=lambda family: str(family.name))
def pair(
    request: pytest.FixtureRequest,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """The pair of each family, kept until the module's last test of it has ended."""
    family: Family = request.param
    folder = tmp_path_factory.mktemp(family.name)
    with started(family, checkpoints[family.name], folder) as found:
        yield found


def hand_over_all(
    family: Family, prefill: Engine, decode: Engine, lengths: Sequence[int], seed: int
) -> None:
    """The text is right, all came from the other engine, and all blocks come back."""
    engines = prefill, decode
    free = [idle_blocks(engine) for engine in engines]
    before = decode.run(probes.metrics)
    prompts = [prompt(length, seed) for length in lengths]
    if family.steady:
        expected = texts(prefill, *prompts, max_tokens=16)
        got, _ = hand_over(prefill, decode, *prompts, max_tokens=16)
        assert got == expected
        # vLLM counts the only token of a prompt as computed here, also where it was loaded.
        handed = sum(len(each) - max(family.left, len(each) == 1) for each in prompts)
    else:
        for each in prompts:
            got_tokens, expected_tokens = one_by_one(family, prefill, decode, each, 5)
            assert got_tokens == expected_tokens, f"{len(each)} tokens"
        handed = sum(lengths)
    assert pulled(decode.run(probes.metrics)) - pulled(before) == handed
    forget(*engines)
    eventually(lambda: [engine.run(probes.free_blocks) for engine in engines] == free)
    assert prefill.run(probes.statuses) == decode.run(probes.statuses) == []


def one_by_one(
    family: Family, prefill: Engine, decode: Engine, tokens: list[int], count: int
) -> tuple[list[int], list[int]]:
    """What one engine answers with another's cache, and what it should.

    Where a text depends on how its tokens were computed, the prompt is handed over with the token
    that an engine answered to its front; what is to come is that engine's text from there on.
    """
    if family.steady:
        [expected] = prefill.generate(tokens, max_tokens=count)
        [completion] = decode.generate(tokens, params=prefill.prefill(tokens), max_tokens=count)
        return completion.tokens, expected.tokens
    [expected] = prefill.generate(tokens, max_tokens=count + 1)
    whole = [*tokens, expected.tokens[0]]
    tickets = prefill.prefill(whole if family.left else tokens)
    [completion] = decode.generate(whole, params=tickets, max_tokens=count)
    return completion.tokens, expected.tokens[1:]
