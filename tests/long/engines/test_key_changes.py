"""Real engines whose keys and ticket secrets change while they serve."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from examples.tiny_llama import prompt
from kvferry.cli.commands import app
from kvferry.core.security import generate
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.messages import Completion
from tests.engines.steps import eventually, hand_over, texts

pytestmark = pytest.mark.timeout(300)

OLD, NEW = "the old secret of both engines", "the new secret of both engines"


class Side(NamedTuple):
    """An engine, and the folder that it reads its keys and secrets from."""

    engine: Engine
    folder: Path

    def write(self, name: str, content: str) -> None:
        """Replace one of the files, by a rename."""
        newer = self.folder / f"{name}.newer"
        newer.write_text(content)
        newer.chmod(0o600)
        newer.rename(self.folder / name)


@pytest.fixture(scope="module")
def sides(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Side, Side]:
    """Prefill of one rank and decode of two, each with files of its own."""
    keys: Path = tmp_path_factory.mktemp("keys")
    assert CliRunner().invoke(app, ["keygen", str(keys)]).exit_code == 0
    (keys / "ticket.secret").write_text(OLD)

    def start(mine: str, theirs: str, role: str, ranks: int) -> Side:
        folder = keys / f"of-{mine}"
        folder.mkdir()
        for name in (f"{mine}.secret", f"{theirs}.public", "ticket.secret"):
            shutil.copy(keys / name, folder / name)
        extra = {
            "curve_secret_key": f"file:{folder}/{mine}.secret",
            "curve_peers": [f"file:{folder}/{theirs}.public"],
            "ticket_secrets": [f"file:{folder}/ticket.secret"],
            "kv_lease_duration": 200,
            "liveness_interval": 0.5,
            "liveness_misses": 100,
        }
        policy = {"kv_load_failure_policy": "fail"}
        engine = start_engine(
            f"changing-{mine}", role, extra=extra, transfer=policy, tensor_parallel_size=ranks
        )
        return Side(engine, folder)

    return (
        start("prefill", "decode", "kv_producer", 1),
        start("decode", "prefill", "kv_consumer", 2),
    )


SEEDS = itertools.count(100)


def works(prefill: Engine, decode: Engine, reference: Engine) -> bool:
    """Hand several requests over; every one has to be answered with the right text."""
    prompts = [prompt(70, seed=next(SEEDS)) for _ in range(4)]
    answers, _ = hand_over(prefill, decode, *prompts)
    return answers == texts(reference, *prompts)


def is_logged(engine: Engine, words: str, times: int = 1) -> Callable[[], bool]:
    return lambda: engine.log().count(words) >= times


def decoded(decode: Engine, tokens: list[int], ticket: dict[str, Any]) -> Completion:
    [completion] = decode.generate(tokens, params=ticket)
    return completion


def refusal(decode: Engine, completion: Completion) -> str:
    """What decode's log says of a request that failed."""
    assert completion.finish_reason == "error"
    return "\n".join(line for line in decode.log().splitlines() if completion.id in line)


def test_ticket_secret_is_replaced_under_running_requests(
    reference: Engine, sides: tuple[Side, Side]
) -> None:
    """In three edits of both engines' files, one engine after the other; no request is lost."""
    prefill, decode = (side.engine for side in sides)
    assert works(prefill, decode, reference)
    late = prompt(70, seed=1)
    [late_ticket] = prefill.prefill(late)
    steps = [f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n", f"{NEW}\n"]
    for count, (content, side) in enumerate(itertools.product(steps, sides)):
        taken = is_logged(side.engine, "ticket_secrets was read again: ", count // 2 + 1)
        before = prompt(70, seed=next(SEEDS))
        [ticket] = prefill.prefill(before)
        side.write("ticket.secret", content)
        # Requests go on before, while and after the engine takes the change.
        eventually(lambda taken=taken: works(prefill, decode, reference) and taken())  # type: ignore[misc]
        assert [decoded(decode, before, ticket).text] == texts(reference, before)
    assert "its engine signs with none of the 1 ticket_secrets" in refusal(
        decode, decoded(decode, late, late_ticket)
    )
    assert [secret for secret in (OLD, NEW) if secret in prefill.log() + decode.log()] == []


def test_removed_key_is_refused_until_it_is_listed_again(
    reference: Engine, sides: tuple[Side, Side]
) -> None:
    (prefill, folder), (decode, _) = sides
    listed = (folder / "decode.public").read_text()
    assert works(prefill, decode, reference)
    sides[0].write("decode.public", generate().public.hex())
    for who in ("scheduler half", "rank 0"):
        eventually(is_logged(prefill, f"{who}: curve_peers was read again: 1 key"))
    # Decode is connected. When its next ping is refused, it closes that connection.
    mine = prompt(70, seed=next(SEEDS))

    def is_refused() -> bool:
        [ticket] = prefill.prefill(mine)
        completion = decoded(decode, mine, ticket)
        loaded = completion.finish_reason == "length"
        return not loaded and "refuses this engine's key" in refusal(decode, completion)

    eventually(is_refused)

    sides[0].write("decode.public", listed)
    eventually(is_logged(prefill, "scheduler half: curve_peers was read again", 2))
    [ticket] = prefill.prefill(mine)
    eventually(lambda: decoded(decode, mine, ticket).finish_reason == "length")
    assert works(prefill, decode, reference)
