"""Messages, tickets and addresses have the same bytes as when they were pinned.

Engines of two builds exchange messages while a deployment is upgraded, so each build must read what
the other one writes. ``python -m tests.pinned.write`` adds new samples to ``bytes.txt`` and never
changes those in it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from kvferry.core import messages as wire
from kvferry.drivers.loopback import address as loopback
from kvferry.drivers.loopback import notifications
from kvferry.drivers.nixl import address as nixl
from kvferry.drivers.ucx import address as ucx
from kvferry.drivers.ucx import messages
from tests.pinned import write as store
from tests.pinned.samples import SAMPLES

PINNED = store.load()
HASHES = {"digest", "full_digest"}
"""Fields of addresses whose values are computed, whatever a constructor was given."""

each_name = pytest.mark.parametrize("name", SAMPLES)


@each_name
def test_a_message_is_encoded_as_pinned(name: str) -> None:
    pinned = PINNED.get(name)
    assert pinned is not None, f"{name!r} is not pinned: run python -m tests.pinned.write"
    assert SAMPLES[name].make() == pinned, (
        f"the bytes of {name!r} changed, so engines of older builds cannot read it any more, or "
        "read something else. Undo the change. If it is meant, it needs a new version of the "
        "message and a page in docs/adr/, and older engines must go on understanding it"
    )


@each_name
def test_pinned_bytes_are_decoded_to_the_same_message(name: str) -> None:
    sample = SAMPLES[name]
    try:
        found = sample.read(PINNED[name])
    except Exception as exc:
        raise AssertionError(f"{name!r} as older engines write it is refused: {exc}") from exc
    assert found == sample.found, f"{name!r} as older engines write it is read as something else"


def test_every_pinned_message_has_a_sample() -> None:
    missing = PINNED.keys() - SAMPLES.keys()
    assert not missing, f"older engines write {sorted(missing)}, and no sample reads it"


def test_the_script_reproduces_the_file(tmp_path: Path) -> None:
    copy = tmp_path / "bytes.txt"
    store.save({name: sample.make() for name, sample in SAMPLES.items()}, copy)
    assert copy.read_bytes() == store.FILE.read_bytes()
    assert store.load(copy) == PINNED


def structs(module: ModuleType) -> Iterator[type[msgspec.Struct]]:
    """Yield the messages that a module defines."""
    for value in vars(module).values():
        own = isinstance(value, type) and value.__module__ == module.__name__
        if own and issubclass(value, msgspec.Struct) and not value.__name__.startswith("_"):
            yield value


def nodes(root: object) -> Iterator[object]:
    """Yield a message and all objects in it that have fields."""
    if isinstance(root, msgspec.Struct) or dataclasses.is_dataclass(root):
        yield root
        for name, _ in fields_of(type(root)):
            yield from nodes(getattr(root, name))
    elif isinstance(root, list | tuple):
        for each in root:
            yield from nodes(each)


MISSING = object()


def fields_of(cls: Any) -> Iterator[tuple[str, object]]:
    """Yield name and default (``MISSING`` if there is none) of each field of a class."""
    if issubclass(cls, msgspec.Struct):
        for field in msgspec.structs.fields(cls):
            made = field.default_factory() if callable(field.default_factory) else field.default
            yield field.name, MISSING if field.required else made
    else:
        for each in dataclasses.fields(cls):
            yield each.name, MISSING if each.default is dataclasses.MISSING else each.default


ALL_NODES = [node for sample in SAMPLES.values() for each in sample.objects for node in nodes(each)]


@pytest.mark.parametrize(
    "module", [wire, loopback, notifications, nixl, messages, ucx], ids=lambda each: each.__name__
)
def test_every_message_of_a_module_is_pinned(module: ModuleType) -> None:
    pinned = {cls for node in ALL_NODES for cls in type(node).__mro__}
    missing = [cls.__name__ for cls in structs(module) if cls not in pinned]
    assert not missing, f"no sample has {missing}: add some to samples.py"


def test_every_optional_field_is_pinned_with_and_without_a_value() -> None:
    seen: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for node in ALL_NODES:
        for name, default in fields_of(type(node)):
            if default is not MISSING and name not in HASHES | {"magic"}:
                seen[type(node).__name__, name].add(getattr(node, name) != default)
    lacking = {field: given for field, given in seen.items() if given != {True, False}}
    assert not lacking, f"seen only with a value (True) or without: {lacking}"
