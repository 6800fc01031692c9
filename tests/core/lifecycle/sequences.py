"""Sequences of events that find planted faults, which ``sequences.json`` has by model and fault.

Each is the name of the invariant that breaks, then calls of rules.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

from tests.core.lifecycle.model import Call, Sequence
from tests.core.lifecycle.two_engines import Leaves

PATH = Path(__file__).with_name("sequences.json")


def load() -> dict[str, dict[str, Sequence]]:
    return {
        model: {
            fault: Sequence(what, [_decode_call(*each) for each in calls])
            for fault, (what, *calls) in found.items()
        }
        for model, found in json.loads(PATH.read_text()).items()
    }


def save(sequences: dict[str, dict[str, Sequence]]) -> None:
    """Write sequences, each on a line of its own."""
    models = []
    for model, found in sequences.items():
        lines = [
            f"{json.dumps(fault)}: {json.dumps([each.found, *each.calls], default=_encode)}"
            for fault, each in found.items()
        ]
        models.append(f"{json.dumps(model)}: {{\n" + ",\n".join(lines) + "\n}")
    PATH.write_text("{\n" + ",\n".join(models) + "\n}\n")


def _decode_call(rule: str, arguments: dict[str, Any]) -> Call:
    return rule, {name: _decode(name, value) for name, value in arguments.items()}


def _decode(name: str, value: Any) -> Any:
    if name == "picks":
        return bytes.fromhex(value)
    if name == "leaves":
        return Leaves[value]
    if name in ("heard", "ranks") and isinstance(value, list):
        return slice(*value)
    return value


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, slice):
        return [value.start, value.stop]
    raise TypeError(value)
