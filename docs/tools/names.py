"""Find names whose docstring is missing or too long: ``python -m docs.tools.names``.

Ruff's D rules check modules, classes and functions, but not constants and type aliases, which the
reference shows only if a docstring follows their assignment. So this script checks every name in an
``__all__`` of kvferry, in the module that defines the name. And a private function or class of the
core and the drivers has a docstring of one line, or none. The script needs only the standard
library, and does not import kvferry.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SHORT = ("kvferry/core", "kvferry/drivers")  # folders whose private docstrings have one line
HOOKS = "kvferry/core/transport/base.py"
"""Its private methods are what the author of a driver implements."""

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _tree(root: Path, module: str) -> ast.Module | None:
    """Return the syntax tree of a module, or ``None`` if it is not in the folder."""
    path = root / Path(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    file = next((each for each in files if each.is_file()), None)
    return ast.parse(file.read_text()) if file else None


@cache
def _imports(root: Path, module: str) -> dict[str, tuple[str, str]]:
    """Return the module that each name of a module is imported from, and its name there."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(_tree(root, module) or ast.Pass())
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }


def _is_documented(root: Path, module: str, name: str) -> bool:
    """Return whether a name has a docstring in the module that defines the name.

    It counts as documented if a module outside of the folder defines it, or none: importing it
    fails, which other checks notice.
    """
    tree = _tree(root, module)
    if tree is None:
        return True
    if origin := _imports(root, module).get(name):
        return _is_documented(root, *origin)
    for node in tree.body:
        if isinstance(node, _Definition) and node.name == name:
            return ast.get_docstring(node) is not None
    found = [text for assigned, _, text in _assignments(tree) if assigned == name]
    return not found or any(found)


def undocumented(root: Path) -> Iterator[str]:
    """Yield a line of text for each exported name of kvferry that has no docstring."""
    for path in sorted((root / "kvferry").rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        tree = _tree(root, module) if "__all__" in path.read_text() else None
        for assigned, value, _ in _assignments(tree):
            if assigned == "__all__" and isinstance(value, ast.List | ast.Tuple):
                for name in ast.literal_eval(value):
                    if not _is_documented(root, module, name):
                        yield f"{module}: {name} is exported and has no docstring"


def long_private(root: Path) -> Iterator[str]:
    """Yield a line for each private docstring of several lines.

    Private is what begins with an underscore, and what is inside a private class or a function.
    """
    for path in (path for folder in SHORT for path in sorted((root / folder).rglob("*.py"))):
        file = path.relative_to(root).as_posix()
        if file != HOOKS:
            for node in _private(ast.parse(path.read_text()), inside=False):
                if "\n" in (ast.get_docstring(node) or ""):
                    yield f"{file}:{node.lineno}: {node.name} is private: one line will do"


def _private(tree: ast.AST, *, inside: bool) -> Iterator[_Definition]:
    """Yield the private definitions in a tree; all are if it is ``inside`` of one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Definition):
            private = inside or node.name.startswith("_")
            if private:
                yield node
            yield from _private(node, inside=private or not isinstance(node, ast.ClassDef))
        else:
            yield from _private(node, inside=inside)


def _assignments(tree: ast.Module | None) -> Iterator[tuple[str, ast.expr | None, bool]]:
    """Yield each name that a module assigns, its value, and whether a docstring follows."""
    if tree is None:
        return
    for node, after in pairwise([*tree.body, ast.Pass()]):
        text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value, text
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value, text


def main() -> int:
    """Print what is wrong; return 1 if anything is, else 0."""
    found = [*undocumented(ROOT), *long_private(ROOT)]
    sys.stderr.writelines(f"{problem}\n" for problem in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
