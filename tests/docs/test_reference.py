"""The generated parts of the reference name all that the code has, and what lacks a docstring."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta
from typer.testing import CliRunner

from docs.tools.names import undocumented
from docs.tools.reference import attributes, commands, settings
from kvferry.cli import app
from kvferry.integrations.vllm.config import Config

ROOT = Path(__file__).parents[2]


@dataclass
class Sample:
    """Settings of nothing.

    Attributes:
        share: how much, ``0.5`` or
            a|b.
        names (list): who.
        path: where.
    """

    share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    names: tuple[str, ...] = ()
    path: str | None = None


@dataclass
class Silent:
    """Settings of nothing.

    Attributes:
        said: something.
    """

    said: int
    unsaid: int


def test_a_setting_has_its_bounds_its_default_and_what_is_said_of_it() -> None:
    assert settings(f"{__name__}:Sample").splitlines()[2:] == [
        "| `share` | number, above 0 to 1 | `0.5` | How much, `0.5` or a\\|b. |",
        "| `names` | list of text | none | Who. |",
        "| `path` | text | none | Where. |",
    ]


def test_a_setting_of_which_nothing_is_said_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Silent: no word on unsaid under Attributes"):
        settings(f"{__name__}:Silent")


def test_only_the_section_of_attributes_counts() -> None:
    text = "Args:\n    a: one.\n\nAttributes:\n    b: two\n        lines.\n\nRaises:\n    c: three."
    assert attributes(text) == {"b": "Two lines."}


def test_every_setting_of_the_connector_is_listed() -> None:
    table = settings("kvferry.integrations.vllm.config:Config")
    assert [f"`{field.name}`" in table for field in fields(Config)] == [True] * len(fields(Config))
    assert len(table.splitlines()) == 2 + len(fields(Config))


def test_every_command_is_there_with_all_that_its_help_says() -> None:
    page = commands("kvferry.cli:app")
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.callback.__name__
        _, after = page.split(f"\n## kvferry {name}\n")
        section = after.split("\n## ")[0]
        options = [
            word
            for line in CliRunner().invoke(app, [name, "--help"]).output.splitlines()
            for word in line.split()[:1]
            if word.startswith("--")
        ]
        assert [option for option in options if f"`{option}" not in section] == []
        first = (inspect.getdoc(command.callback) or "").partition("\n")[0]
        assert first in section


# Names without a docstring.


def package(folder: Path, **modules: str) -> list[str]:
    """What is undocumented in a package of these modules."""
    (folder / "kvferry").mkdir()
    for name, text in modules.items():
        (folder / "kvferry" / f"{name}.py").write_text(text)
    return list(undocumented(folder))


def test_a_constant_that_is_exported_needs_a_docstring(tmp_path: Path) -> None:
    one = '__all__ = ["A", "B", "C"]\nA = 1\n"""One."""\nB: int = 2\nC = 3\n'
    found = package(tmp_path, one=one)
    assert found == [
        "kvferry.one: B is exported and has no docstring",
        "kvferry.one: C is exported and has no docstring",
    ]


def test_a_name_is_looked_at_where_it_is_defined(tmp_path: Path) -> None:
    found = package(
        tmp_path,
        __init__='from os import sep\nfrom kvferry.one import A, f\n__all__ = ["A", "f", "sep"]\n',
        one='A = 1\n\ndef f() -> None:\n    """Do nothing."""\n',
    )
    assert found == ["kvferry: A is exported and has no docstring"]


def test_kvferry_exports_nothing_without_a_docstring() -> None:
    assert list(undocumented(ROOT)) == []
