"""Servers whose weights a trainer changes while they run, as reinforcement learning does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.engines import engines
from tests.engines.engines import CONNECTOR, PATIENT
from tests.engines.fleet import RECOMPUTE, TWO_WAY
from tests.engines.http_server import HttpServer

MODES = ("abort", "wait", "keep")
WEIGHTS = "model.safetensors"
LONG = {"kv_lease_duration": 600.0, "decoder_kv_blocks_ttl": 600.0}
"""Longer than a test waits for any answer, so that nothing that it waits for is the end of a lease.
"""


class Trained(HttpServer):
    """A server that a trainer pauses, and gives other weights."""

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post what has to succeed; return the answer."""
        status, answer = self.post(path, dict(body or {}))
        assert status == 200, f"{path}: {answer}\n{self.log()[-3000:]}"
        return json.loads(answer) if answer else None

    def answer(
        self, prompt: list[int], ticket: Any = None, *, model: str = "", **options: Any
    ) -> dict[str, Any]:
        """Ask for a completion by the model or an adapter.

        Returns:
            Its ``text``, all ``tokens`` with it, ``ticket``, and the ``reason`` of its end.
        """
        status, answer = self.complete(
            model or self.model, prompt, params=ticket, return_token_ids=True, **options
        )
        assert status == 200, f"{answer}\n{self.log()[-3000:]}"
        [choice] = answer["choices"]
        return {
            "text": choice["text"],
            "tokens": [*prompt, *choice["token_ids"]],
            "ticket": answer["kv_transfer_params"],
            "reason": choice["finish_reason"],
        }

    def pause(self, mode: str, *, clears: bool = True) -> None:
        self.ask(f"/pause?mode={mode}&clear_cache={str(clears).lower()}")

    def resume(self) -> None:
        self.ask("/resume")

    def rpc(self, method: str) -> list[Any]:
        """Call a method of each worker."""
        results: list[Any] = self.ask("/collective_rpc", {"method": method})["results"]
        return results

    def update(self, weights: Path, version: str | None = None, mode: str = "abort") -> None:
        """Pause, load the weights of a checkpoint in place, name them if asked to, and go on."""
        self.pause(mode)
        put(weights, Path(self.model))
        self.rpc("reload_weights")
        if version is not None:
            self.ask("/update_weight_version", {"new_version": version})
        assert self.ask("/reset_prefix_cache")["success"]
        self.resume()


def put(weights: Path, model: Path) -> None:
    """Replace the weights of a checkpoint by those of another."""
    new = model / "new"
    shutil.copy(weights / WEIGHTS, new)
    new.rename(model / WEIGHTS)


def checkpoints(folder: Path, count: int) -> list[Path]:
    """Checkpoints of a Llama with other weights each."""
    engines.run_apart(_build, folder, count)
    return sorted(folder.iterdir())


def _build(folder: Path, count: int) -> None:
    from examples.tiny_llama import build

    for number in range(count):
        build(folder / str(number), seed=100 + number)


@contextmanager
def pair(
    weights: Path, folder: Path, extra: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Trained, Trained]]:
    """Two servers that prefill and decode, and lead conversations; with ``extra`` settings."""
    settings = {**PATIENT, **TWO_WAY, **LONG, **(extra or {})}
    transfer = CONNECTOR | RECOMPUTE | {"kv_role": "kv_both", "kv_connector_extra_config": settings}
    options = {"enable_prefix_caching": True, "kv_transfer_config": transfer} | options
    model = shutil.copytree(weights, folder / "model")
    with (
        closing(Trained("prefill", model, folder, **options)) as prefill,
        closing(Trained("decode", model, folder, **options)) as decode,
    ):
        yield prefill.wait_started(), decode.wait_started()
