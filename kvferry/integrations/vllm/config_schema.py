"""The JSON schema of ``kv_connector_extra_config``, made from ``Config`` and its docstring."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from kvferry.integrations.vllm.config import Config

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """Return the JSON schema of ``kv_connector_extra_config``, with a description of each key."""
    _, definitions = msgspec.json.schema_components([Config])
    made: dict[str, Any] = definitions["Config"]
    described = attributes(inspect.getdoc(Config) or "")
    for name, setting in made["properties"].items():
        setting["description"] = described[name].replace("``", "`")
    return {
        "$schema": DIALECT,
        **made,
        "title": "kv_connector_extra_config of KVFerryConnector",
        "description": "The settings of one engine.",
        "additionalProperties": False,
    }


def attributes(docstring: str) -> dict[str, str]:
    """Return the descriptions in the ``Attributes`` section of a docstring, each on one line.

    Args:
        docstring: A docstring in Google's style, without indentation.

    Returns:
        The description of each attribute, by its name.
    """
    found: dict[str, list[str]] = {}
    name = ""
    inside = False
    for line in docstring.splitlines():
        if not line.startswith(" ") and line:
            inside = line == "Attributes:"
        elif inside and (entry := re.match(r"    (\w+)(?: \([^)]*\))?:\s*(.*)", line)):
            name = entry[1]
            found[name] = [entry[2]]
        elif inside and name and line:
            found[name].append(line.strip())
    return {name: " ".join(lines) for name, lines in found.items()}
