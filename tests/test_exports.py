"""Exports of ``kvferry``: each is documented, works, and is only imported when used."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import kvferry
from tests.test_house import run_python

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_ranks.py"
EXPORTED = sorted(set(kvferry.__all__) - {"__version__"})


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_name_exists_and_has_a_docstring_of_its_own(name: str) -> None:
    exported = getattr(kvferry, name)
    assert isinstance(exported, type) or callable(exported)
    assert exported.__module__.startswith("kvferry.core.")
    assert exported.__doc__
    # Without a docstring, a dataclass gets its signature, and a class its base's docstring.
    assert not exported.__doc__.startswith(f"{exported.__name__}(")
    assert inspect.getsource(exported).count(exported.__doc__.splitlines()[0]) == 1


def test_type_checking_imports_match_the_lazy_exports() -> None:
    tree = ast.parse(Path(kvferry.__file__).read_text())
    [block] = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}".removeprefix("kvferry.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == kvferry._SOURCES
    assert sorted(imported) == EXPORTED


def test_importing_and_listing_loads_nothing_else() -> None:
    code = """
import sys
before = {*sys.modules}
import kvferry
print(*dir(kvferry))
print(*{*sys.modules} - before)
"""
    listed, loaded = (line.split() for line in run_python(code).splitlines())
    assert set(EXPORTED) <= set(listed)
    assert loaded == ["kvferry"]


def test_the_example_needs_at_most_four_names() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    [own] = [node for node in imports if str(node.module).startswith("kvferry")]
    assert own.module == "kvferry"
    assert len(own.names) <= 4


def test_every_step_of_the_example_has_a_docstring() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 5
    assert all(map(ast.get_docstring, functions))
