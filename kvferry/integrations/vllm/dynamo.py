"""Registration with NVIDIA Dynamo, whose vLLM workers refuse connectors that it does not know.

Dynamo has a table of connectors, with a class each that makes a request's ``kv_transfer_params``.
The class for NixlConnector asks prefill for a ticket and passes the answer to decode unchanged, as
kvferry needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

MODULE = "dynamo.vllm.kv_connector_protocols"
"""Dynamo's module with the table; it imports the standard library only."""

PACKAGE, WORKERS = "dynamo", "vllm"
"""The package of that module, and the folder in it that has Dynamo's vLLM workers."""

TABLE = "KV_CONNECTOR_PROTOCOLS"
SAME_AS = "NixlConnector"
"""The connector whose entry in the table is used."""


def register(name: str) -> None:
    """Register the connector with Dynamo where Dynamo is installed; elsewhere do nothing.

    An entry that Dynamo has for this name remains. Where Dynamo's table is not found, log a
    warning. Other modules that are called ``dynamo`` are not imported.
    """
    if not _is_installed():
        return
    try:
        table = getattr(importlib.import_module(MODULE), TABLE)
        table.setdefault(name, table[SAME_AS])
    except Exception as exc:  # noqa: BLE001 - an error here would end every engine, with Dynamo or not
        logger.warning(
            "Dynamo's vLLM workers may refuse %r: %s.%s is not as in Dynamo 1.6.1 (%s: %s). Use "
            "Dynamo 1.6.1, or another router",
            name,
            MODULE,
            TABLE,
            type(exc).__name__,
            exc,
        )


def _is_installed() -> bool:
    """Return whether there is a package ``dynamo`` with vLLM workers. Imports nothing."""
    try:
        found = importlib.util.find_spec(PACKAGE)
    except ValueError:  # a module that is imported already and has no spec
        return False
    folders = found.submodule_search_locations if found is not None else None
    return any(Path(folder, WORKERS).is_dir() for folder in folders or ())
