"""Engines of one checkpoint that start at the same time and end together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.engines.engines import CONNECTOR, PATIENT, Engine


class Fleet:
    """Engines of a model, unless they have one of their own; ``options`` are for all of them."""

    def __init__(self, model: Path, folder: Path, options: Mapping[str, Any]) -> None:
        self._model = model
        self._folder = folder
        self._options = options
        self._engines: list[Engine] = []

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
            options["kv_transfer_config"] = (
                CONNECTOR
                | {"kv_role": role, "kv_connector_extra_config": {**PATIENT, **(extra or {})}}
                | dict(transfer or {})
            )
        model = model or self._model
        engine = Engine(f"{model.name}-{name}", model, self._folder, **{**self._options, **options})
        self._engines.append(engine)
        return engine

    def start(self, name: str, role: str | None = None, **options: Any) -> Engine:
        """Launch an engine, and wait until it serves."""
        return self.launch(name, role, **options).wait_started()

    def wait_started(self) -> None:
        """Return when all serve."""
        for engine in self._engines:
            engine.wait_started()

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
