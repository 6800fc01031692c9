"""The generated reference lists all settings and commands; undocumented names are reported."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta
from typer.testing import CliRunner

from docs.tools.names import long_private, undocumented
from docs.tools.reference import commands, settings
from kvferry.cli.commands import app
from kvferry.integrations.vllm.config import Config


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


class PartlyDocumented(Sample):
    """Settings of nothing.

    Attributes:
        share, names: something.
    """


def test_setting_is_listed_with_bounds_default_and_text() -> None:
    assert settings(f"{__name__}:Sample").splitlines()[2:] == [
        "| `share` | number, above 0 to 1 | `0.5` | How much, `0.5` or a\\|b. |",
        "| `names` | list of text | none | Who. |",
        "| `path` | text | none | Where. |",
    ]
    with pytest.raises(ValueError, match=r"PartlyDocumented: no word on .*path under Attributes"):
        settings(f"{__name__}:PartlyDocumented")


def test_all_settings_of_the_connector_are_listed() -> None:
    table = settings("kvferry.integrations.vllm.config:Config")
    assert [field.name for field in fields(Config) if f"`{field.name}`" not in table] == []
    assert len(table.splitlines()) == 2 + len(fields(Config))


def test_all_commands_and_options_are_listed() -> None:
    page = commands("kvferry.cli.commands:app")
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        _, after = page.split(f"\n## kvferry {name}\n")
        section = after.split("\n## ")[0]
        shown = CliRunner().invoke(app, [name, "--help"]).output.splitlines()
        first = [line.split()[0] for line in shown if line.split()]
        options = [word for word in first if word.startswith("--")]
        assert [option for option in options if f"`{option}" not in section] == []
        assert (inspect.getdoc(command.callback) or "").partition("\n")[0] in section


def test_exported_names_need_a_docstring_where_they_are_defined(tmp_path: Path) -> None:
    for name, text in {
        "one": '__all__ = ["A", "B", "C"]\nA = 1\n"""One."""\nB: int = 2\nC = 3\n'
        'def f() -> None:\n    """Do nothing."""\n',
        "__init__": "from os import sep\nfrom kvferry.one import C, f\n"
        '__all__ = ["C", "f", "sep"]\n',
    }.items():
        (tmp_path / "kvferry").mkdir(exist_ok=True)
        (tmp_path / "kvferry" / f"{name}.py").write_text(text)
    assert list(undocumented(tmp_path)) == [
        "kvferry: C is exported and has no docstring",
        "kvferry.one: B is exported and has no docstring",
        "kvferry.one: C is exported and has no docstring",
    ]


def test_private_docstring_of_two_lines_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "kvferry" / "core"
    folder.mkdir(parents=True)
    text = '"""Do it.\n\n    Twice."""\n'
    (folder / "one.py").write_text(
        f"def f():\n    {text}"
        f"def _g():\n    {text}"
        'def _short():\n    """Do it."""\n'
        f"class _Private:\n    def __init__(self):\n        {text}"
        f"class Public:\n    {text}    def _h(self):\n        {text}"
    )
    found = [line.split(":")[2].split()[0] for line in long_private(tmp_path)]
    assert found == ["_g", "__init__", "_h"]
