"""Everything that crosses between engines has the bytes that it had when it was pinned.

Engines of two builds run beside each other while a deployment is upgraded, so what one build
writes another one must read. ``bytes.txt`` was written by ``python -m tests.pinned.write``, which
adds what is new and never changes what is there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from kvferry.core import messages as wire
from kvferry.drivers.loopback import address as loopback
from kvferry.drivers.loopback import notifications as mail
from kvferry.drivers.nixl import address as nixl
from kvferry.drivers.ucx import address as ucx
from kvferry.drivers.ucx import messages
from tests.pinned import store
from tests.pinned.samples import SAMPLES

PINNED = store.load()
SURROUNDING = 24
HASHES = {"digest", "full_digest"}
"""Fields of addresses that are written over whatever a constructor was given."""

each_name = pytest.mark.parametrize("name", SAMPLES)


def difference(name: str, made: bytes, pinned: bytes) -> str:
    """Return what to say of a message whose bytes changed."""
    pairs = zip(made, pinned, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    part = slice(max(0, same - SURROUNDING), same + SURROUNDING)
    return (
        f"the bytes of {name!r} changed, so engines of older builds cannot read it any more, or "
        f"read something else. {len(pinned)} bytes are pinned, {len(made)} are made now, and from "
        f"byte {same} on they differ:\n"
        f"  pinned {pinned[part]!r}\n"
        f"  now    {made[part]!r}\n"
        "Undo the change. If it is meant, it needs a new version of the message and a page in "
        "docs/adr/, and older engines must go on understanding it"
    )


@each_name
def test_the_bytes_are_those_that_were_pinned(name: str) -> None:
    pinned = PINNED.get(name)
    assert pinned is not None, f"{name!r} is not pinned: run python -m tests.pinned.write"
    made = SAMPLES[name].make()
    if made != pinned:
        pytest.fail(difference(name, made, pinned))


@each_name
def test_the_pinned_bytes_are_read_as_what_was_written(name: str) -> None:
    sample = SAMPLES[name]
    try:
        found = sample.read(PINNED[name])
    except Exception as exc:
        raise AssertionError(f"{name!r} as older engines write it is refused: {exc}") from exc
    assert found == sample.found, f"{name!r} as older engines write it is read as something else"


def test_nothing_that_was_pinned_is_left_out() -> None:
    missing = PINNED.keys() - SAMPLES.keys()
    assert not missing, f"older engines write {sorted(missing)}, and no sample reads it"


def test_a_changed_byte_is_shown_with_its_message() -> None:
    shown = difference("note, done", b"\x81\xa4slot\x03", b"\x81\xa4slot\x04")
    assert "the bytes of 'note, done' changed" in shown
    assert "engines of older builds cannot read it" in shown
    assert "from byte 6 on they differ" in shown


def test_the_file_is_what_the_script_writes(tmp_path: Path) -> None:
    again = tmp_path / "bytes.txt"
    store.save({name: sample.make() for name, sample in SAMPLES.items()}, again)
    assert again.read_bytes() == store.FILE.read_bytes()
    assert store.load(again) == PINNED


def structs(module: ModuleType) -> Iterator[type[msgspec.Struct]]:
    """Yield the messages that a module defines."""
    for value in vars(module).values():
        own = isinstance(value, type) and value.__module__ == module.__name__
        if own and issubclass(value, msgspec.Struct) and not value.__name__.startswith("_"):
            yield value


def nodes(root: object) -> Iterator[object]:
    """Yield a message and everything in it that has fields."""
    if isinstance(root, msgspec.Struct) or dataclasses.is_dataclass(root):
        yield root
        names = [field.name for field in fields_of(type(root))]
        for name in names:
            yield from nodes(getattr(root, name))
    elif isinstance(root, list | tuple):
        for each in root:
            yield from nodes(each)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Optional:
    """A field of a class; ``default`` is ``MISSING`` where it must be given."""

    name: str
    default: object


MISSING = object()


def fields_of(cls: Any) -> list[Optional]:
    """Return the fields of a message class, or of a class in a message."""
    if issubclass(cls, msgspec.Struct):
        return [
            Optional(
                name=field.name,
                default=MISSING
                if field.required
                else field.default_factory()
                if field.default is msgspec.NODEFAULT
                else field.default,
            )
            for field in msgspec.structs.fields(cls)
        ]
    return [
        Optional(
            name=field.name,
            default=MISSING if field.default is dataclasses.MISSING else field.default,
        )
        for field in dataclasses.fields(cls)
    ]


ALL_NODES = [node for sample in SAMPLES.values() for each in sample.objects for node in nodes(each)]


@pytest.mark.parametrize(
    "module", [wire, loopback, mail, nixl, messages, ucx], ids=lambda each: each.__name__
)
def test_every_message_of_a_module_is_pinned(module: ModuleType) -> None:
    pinned = {cls for node in ALL_NODES for cls in type(node).__mro__}
    missing = [cls.__name__ for cls in structs(module) if cls not in pinned]
    assert not missing, f"no sample has {missing}: add some to samples.py"


def test_every_optional_field_is_pinned_with_and_without_a_value() -> None:
    seen: dict[tuple[str, str], set[bool]] = defaultdict(set)
    for node in ALL_NODES:
        for field in fields_of(type(node)):
            if field.default is not MISSING and field.name not in HASHES | {"magic"}:
                given = getattr(node, field.name) != field.default
                seen[type(node).__name__, field.name].add(given)
    lacking = {field: given for field, given in seen.items() if given != {True, False}}
    assert not lacking, f"seen only with a value (True) or without: {lacking}"
