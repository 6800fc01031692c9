"""Real engines with keys and signed tickets, which change while they serve."""

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
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import check_decoded, check_hand_over, check_refused
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

OLD, NEW = "the old secret of both engines", "the new secret of both engines"
SEEDS = itertools.count(100)


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
    """Prefill of one rank and decode of two, as ``kvferry keygen`` sets them up."""
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
            "allowed_peers": ["127.0.0.0/8"],
            "kv_lease_duration": 200,
        }
        return Side(start_engine(mine, role, extra=extra, tensor_parallel_size=ranks), folder)

    return (
        start("prefill", "decode", "kv_producer", 1),
        start("decode", "prefill", "kv_consumer", 2),
    )


def test_engines_with_keys_hand_over(reference: Engine, sides: tuple[Side, Side]) -> None:
    """Also where a router has rewritten the address of a ticket."""
    prefill, decode = (side.engine for side in sides)
    check_hand_over(reference, prefill, decode, prompt(70, seed=1))
    [ticket] = prefill.prefill(prompt(70, seed=8))
    ticket |= {"remote_host": "192.0.2.1", "remote_port": 1}
    check_decoded(reference, decode, prompt(70, seed=8), ticket)
    quiet = prefill.log() + decode.log()
    assert "is open: whoever reaches it learns" not in quiet
    assert "tickets are not signed" not in quiet


def test_ticket_secret_is_replaced_under_running_requests(
    reference: Engine, sides: tuple[Side, Side]
) -> None:
    """In three edits of both engines' files, one engine after the other; no request is lost."""
    prefill, decode = (side.engine for side in sides)
    late = prompt(70, seed=1)
    [late_ticket] = prefill.prefill(late)
    steps = [f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n", f"{NEW}\n"]
    for count, (content, side) in enumerate(itertools.product(steps, sides)):
        taken = is_logged(side.engine, "ticket_secrets was read again: ", count // 2 + 1)
        before = prompt(70, seed=next(SEEDS))
        [ticket] = prefill.prefill(before)
        side.write("ticket.secret", content)
        while not taken():  # requests go on before, while and after the engine takes the change
            check_hand_over(reference, prefill, decode, prompt(70, seed=next(SEEDS)))
        check_decoded(reference, decode, before, ticket)
    check_refused(decode, late, late_ticket, "its engine signs with none of the 1 ticket_secrets")
    assert [secret for secret in (OLD, NEW) if secret in prefill.log() + decode.log()] == []


def test_removed_key_is_refused(sides: tuple[Side, Side]) -> None:
    """The last test: decode is connected, and closes that connection when it is refused."""
    prefill, decode = (side.engine for side in sides)
    sides[0].write("decode.public", (sides[1].folder / "prefill.public").read_text())
    for who in ("scheduler half", "rank 0"):
        eventually(is_logged(prefill, f"{who}: curve_peers was read again: 1 key"))
    mine: dict[str, Any] = {}

    def is_refused() -> bool:
        [mine["ticket"]] = prefill.prefill(prompt(40))
        [completion] = decode.generate(prompt(40), params=mine["ticket"])
        return bool(completion.finish_reason == "error")

    eventually(is_refused)
    check_refused(decode, prompt(40), mine["ticket"], "refuses this engine's key")


def is_logged(engine: Engine, words: str, times: int = 1) -> Callable[[], bool]:
    return lambda: engine.log().count(words) >= times
