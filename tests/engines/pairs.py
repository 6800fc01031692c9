"""Two engines of a model family, with unlike blocks, which hand over to each other in any way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import prompt
from tests.engines.engines import Engine
from tests.engines.fleet import TALKS, fleet
from tests.engines.steps import check_hand_over, pulled_by

BF16 = {"dtype": "bfloat16"}
PLAIN_MLA = {"attention_backend": "CPU_MLA"}
"""On machines with AMX, vLLM takes another backend, which knows bfloat16 only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The Llama, or one of `families.FAMILIES`."""

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


GEMMA = Family(name="gemma3", left=1)
GRANITE = Family(name="granite4", left=1, blocks=(96, 128), chunk=128)
ALL = (
    GEMMA,
    GRANITE,
    Family(name="mistral", left=1),
    Family(name="qwen3_next", left=1, blocks=(288, 320), chunk=0, steady=False, options=BF16),
    Family(name="deepseek", blocks=(16, 16), chunk=0, steady=False, options=PLAIN_MLA),
    Family(name="llama"),
    Family(name="qwen3"),
    Family(name="gpt_oss", left=1),
    Family(name="nemotron_h", left=1, blocks=(96, 128), chunk=128),
)
"""Those that docs/coverage.md names."""


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
    def ways(self) -> tuple[tuple[Engine, Engine], ...]:
        """Who prefills, and who decodes."""
        return (self.one, self.two), (self.two, self.one)

    def block(self, engine: Engine) -> int:
        """How many tokens a block of an engine has."""
        return self.family.blocks[engine is self.two]


@contextmanager
def started(family: Family, model: Path, folder: Path, **of_two: Any) -> Iterator[Pair]:
    """A pair that ends with the context; ``of_two`` are more options of the second engine."""
    chunks: dict[str, Any] = {"max_num_batched_tokens": family.chunk} if family.chunk else {}
    of_two = {"async_scheduling": True} | chunks | of_two
    with fleet(model, folder, **family.options) as engines:
        one = engines.launch("one", **TALKS)
        two = engines.launch("two", **TALKS, block_size=64, **of_two)
        engines.wait_started()
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
    """The texts are right, and all came from the other engine."""
    prompts = [prompt(length, seed) for length in lengths]
    if family.steady:
        check_hand_over(prefill, prefill, decode, *prompts, left=family.left)
        return
    before = pulled_by(decode)
    for each in prompts:
        hand_over_one(family, prefill, decode, each, 5)
    assert pulled_by(decode) - before == sum(lengths)


def hand_over_one(
    family: Family, prefill: Engine, decode: Engine, tokens: list[int], count: int
) -> None:
    """One engine answers with another's cache as that one does.

    Where a text depends on how its tokens were computed, the prompt is handed over with the token
    that an engine answered to its front; what is to come is that engine's text from there on.
    """
    extra = 0 if family.steady else 1
    [expected] = prefill.generate(tokens, max_tokens=count + extra)
    whole = [*tokens, *expected.tokens[:extra]]
    tickets = prefill.prefill(whole if family.left else whole[: len(tokens)])
    [completion] = decode.generate(whole, params=tickets, max_tokens=count)
    assert completion.tokens == expected.tokens[extra:], f"{len(tokens)} tokens"
