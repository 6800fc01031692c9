"""Engines of one checkpoint that start at the same time and end together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines import ranks
from tests.engines.engines import PATIENT, Engine, transfer_config

TWO_WAY: dict[str, Any] = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
"""The ``kv_connector_extra_config`` of engines that lead conversations; every token that can be
pulled is."""
RECOMPUTE = {"kv_load_failure_policy": "recompute"}

PREFILLS: dict[str, Any] = {"role": "kv_producer"}
DECODES: dict[str, Any] = {"role": "kv_consumer"}
DOES_BOTH: dict[str, Any] = {"role": "kv_both"}
TALKS: dict[str, Any] = DOES_BOTH | {"extra": TWO_WAY, "transfer": RECOMPUTE}
"""The arguments of `Fleet.launch` that make an engine prefill, decode, do both, or also lead
conversations."""

Engines = dict[str, Engine]
"""By name."""

AT_START: dict[Engine, dict[str, Any]] = {}
"""What engines that hand over must come back to after each test (`ranks.at_rest`)."""


class Fleet:
    """Engines of a model, unless they have one of their own; ``options`` are for all of them."""

    def __init__(self, model: Path, folder: Path, options: Mapping[str, Any]) -> None:
        self._model = model
        self._folder = folder
        self._options = options
        self._engines: list[Engine] = []
        self._unnoted: list[Engine] = []

    def launch(
        self,
        name: str,
        role: str | None = None,
        extra: Mapping[str, Any] | None = None,
        transfer: Mapping[str, Any] | None = None,
        model: Path | None = None,
        **options: Any,
    ) -> Engine:
        """An engine that has yet to start; ``role`` makes it a kvferry engine.

        ``extra`` is its ``kv_connector_extra_config``, ``transfer`` the rest of its
        ``kv_transfer_config``. It may have another ``model``.
        """
        if role is not None:
            extra = PATIENT | dict(extra or {})
            options["kv_transfer_config"] = transfer_config(role, extra) | dict(transfer or {})
        model = model or self._model
        options = {**self._options, **options}
        engine = Engine(f"{model.name}-{name}", model, self._folder, **options)
        self._engines.append(engine)
        if "kv_transfer_config" in options and options.get("python") is None:
            self._unnoted.append(engine)
        return engine

    def start(self, name: str, role: str | None = None, **options: Any) -> Engine:
        """Launch an engine, and wait until it serves."""
        engine = self.launch(name, role, **options)
        self.wait_started()
        return engine

    def wait_started(self) -> None:
        """Return when all that were launched serve."""
        for engine in self._engines:
            if not engine.has_started:
                engine.wait_started()
        while self._unnoted:
            engine = self._unnoted.pop()
            AT_START[engine] = engine.run(ranks.at_rest)

    def close(self) -> None:
        for engine in self._engines:
            engine.begin_close()
        for engine in self._engines:
            engine.close()


@contextmanager
def fleet(model: Path, folder: Path, **options: Any) -> Iterator[Fleet]:
    """A fleet that ends with the context."""
    engines = Fleet(model, folder, options)
    try:
        yield engines
    finally:
        engines.close()


def cast(model: str = "llama", every: Mapping[str, Any] | None = None, /, **engines: Any) -> Any:
    """Return a fixture: engines of a model by name, until the module's last test has ended.

    Args:
        model: A key of the fixture ``checkpoints``.
        every: Options of all engines.
        engines: The arguments of `Fleet.launch` for each.
    """

    @pytest.fixture(scope="module")
    def started(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Engines]:
        alone = model == "llama"
        found = request.getfixturevalue("checkpoint" if alone else "checkpoints")
        folder = tmp_path_factory.mktemp("engines")
        with fleet(found if alone else found[model], folder, **(every or {})) as launched:
            by_name = {name: launched.launch(name, **each) for name, each in engines.items()}
            launched.wait_started()
            yield by_name

    return started
