"""What engines hold for conversations, what became of it, and that nothing of it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvferry.core.lifecycle.prompt_digest import chain
from tests.engines import probes
from tests.engines.conversations import forget, held, kept
from tests.engines.engines import Engine
from tests.engines.ranks import at_rest, come_to
from tests.engines.steps import eventually

__all__ = ["counted", "forged", "held", "kept", "nothing_lost", "outcomes"]


@contextmanager
def nothing_lost(*engines: Engine) -> Iterator[None]:
    """Wait, at the end, until no request is left and only conversations hold blocks.

    The conversations' holds are then ended by a reset, after which all blocks are free.
    """
    rest = at_rest(*engines)
    yield
    forget(*engines)
    come_to(rest, *engines)


def outcomes(engine: Engine) -> dict[str, float]:
    """How many conversations an engine has held, by what became of that."""
    samples: dict[str, float] = engine.run(probes.exposed)
    name = 'conversation_holds_total{driver="loopback",outcome="'
    return {key[len(name) : -2]: value for key, value in samples.items() if key.startswith(name)}


def counted(engine: Engine, before: dict[str, float], **more: int) -> None:
    """Wait until an engine's ``outcomes`` are so many more: metrics may come a step later."""
    wanted = {outcome: before[outcome] + count for outcome, count in more.items()}
    eventually(lambda: wanted.items() <= outcomes(engine).items())


def forged(ticket: dict[str, Any], words: list[int]) -> dict[str, Any]:
    """A ticket whose digests say that it was made for another prompt."""
    blocks = ticket["kvferry"]["blocks"]
    digests = chain(words, blocks["tokens"], bytes.fromhex(blocks["salt"]), (None, None), {})
    return ticket | {"kvferry": ticket["kvferry"] | {"blocks": blocks | {"digests": digests.hex()}}}
