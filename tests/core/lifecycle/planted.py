"""The models, the faults planted in each, searches for both, and the sequences that are kept.

``KVFERRY_MODEL_EXAMPLES=20000 pytest tests/long/lifecycle -k every_order`` searches longer, with
new examples each time; without it, a search is always the same. ``sequences.json`` has, by model
and fault, a sequence of events that finds it: the name of the invariant that breaks, then calls of
rules.
"""

from __future__ import annotations

import json
import os
from enum import Enum
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.lifecycle import conversations, early_tickets, protocol_faults, staged_model
from tests.core.lifecycle.fabric import ProtocolViolation
from tests.core.lifecycle.machine import Protocol
from tests.core.lifecycle.model import Call, Components, Faults, Model, Sequence
from tests.core.lifecycle.two_engines import Leaves

MODELS: dict[str, type[Model]] = {
    "protocol": Protocol,
    "staging": staged_model.Staging,
    "early tickets": early_tickets.EarlyTickets,
    "conversations": conversations.Conversations,
}

PLANTED: dict[str, Faults] = {
    "protocol": protocol_faults.PLANTED,
    "staging": staged_model.PLANTED,
    "early tickets": early_tickets.PLANTED,
    "conversations": conversations.PLANTED,
}

RARELY_FOUND = {
    ("protocol", "the newest answer is reclaimed first"),
    ("protocol", "heartbeats ignored"),
    ("early tickets", "a watermark read before its generation"),
    ("early tickets", "a watermark not zeroed at take-on"),
    ("early tickets", "the read of an old hold not awaited"),
    ("early tickets", "no fence"),
    ("protocol", "the TTL counts from the order"),
    ("protocol", "a TTL at each renewal"),
    ("protocol", "a claim before ready does not count"),
    ("protocol", "a claim before the order is lost"),
}
"""Faults that only their sequences find reliably."""
PATH = Path(__file__).with_name("sequences.json")
EXAMPLES = os.environ.get("KVFERRY_MODEL_EXAMPLES")
FAULT_EXAMPLES = 10_000
"""Most faults are caught in some hundred. A change of any module's constants changes the
examples."""


def plant(model: str, fault: str) -> type[Model]:
    machine, faults = MODELS[model], PLANTED[model]
    components = Components(faults[fault], strict=fault in faults.by_table)
    planted = type("Planted", (machine,), {"components": components})
    planted.__qualname__ = f"Planted[{fault}]"  # Hypothesis takes the seed from the name
    return planted


# Searches.


def search(machine: type[Model], examples: int) -> None:
    chosen = settings(
        settings_of(machine), max_examples=int(EXAMPLES or examples), derandomize=EXAMPLES is None
    )
    run_state_machine_as_test(machine, settings=chosen)


def catch(
    machine: type[Model], examples: int = FAULT_EXAMPLES, *, shrinks: bool = False
) -> ProtocolViolation | None:
    chosen = settings(
        settings_of(machine),
        max_examples=examples,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    try:
        run_state_machine_as_test(machine, settings=chosen)
    except ProtocolViolation as violation:
        return violation
    return None


def settings_of(machine: type[Model]) -> settings:
    return settings(
        database=None,
        stateful_step_count=machine.steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# Sequences.


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
