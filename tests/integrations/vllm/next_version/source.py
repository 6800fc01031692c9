"""Read vLLM's source: everything here parses files, and imports or runs nothing of vLLM."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    root: Path

    @property
    def version(self) -> str:
        """Its version, as it was built; ``unknown`` if the source does not say."""
        found = self.constants("_version.py").get("__version__")
        return ast.literal_eval(found) if found is not None else "unknown"

    def tree(self, path: str) -> ast.Module:
        """Return a file's syntax tree; an empty one if there is no such file."""
        return _parsed(self.root / path)

    def files(self, *folders: str, mentioning: Sequence[str] = ("",)) -> Iterator[str]:
        """Yield the paths of Python files in the package."""
        for folder in folders or (".",):
            for path in sorted((self.root / folder).rglob("*.py")):
                text = path.read_text(encoding="utf-8")
                if any(each in text for each in mentioning):
                    yield path.relative_to(self.root).as_posix()

    def modules(self, *places: str) -> Iterator[str]:
        """Yield the paths of Python files: those named, and all in the folders named."""
        for place in places:
            yield from [place] if place.endswith(".py") else self.files(place)

    def module_path(self, name: str) -> str | None:
        """Return the path of a module; ``None`` if there is no such module."""
        stem = "/".join(name.split(".")[1:])
        candidates = (f"{stem}/__init__.py" if stem else "__init__.py", f"{stem}.py")
        return next((each for each in candidates if (self.root / each).is_file()), None)

    def constants(self, path: str) -> dict[str, ast.expr]:
        """Return the values that a module assigns to names, by name."""
        return {name: value for name, value in assignments(self.tree(path).body) if value}

    def classes(self, path: str) -> dict[str, ast.ClassDef]:
        """Return a module's classes by name."""
        return {n.name: n for n in self.tree(path).body if isinstance(n, ast.ClassDef)}


@functools.cache
def _parsed(path: Path) -> ast.Module:
    if not path.is_file():
        return ast.Module(body=[], type_ignores=[])
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def assignments(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names that statements assign to, and the values; no value for a bare annotation."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield the functions in a tree, methods and nested ones too, by qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def fields(cls: ast.ClassDef) -> dict[str, str]:
    """Return the annotated fields of a class: type and default of each, by name."""
    return {
        node.target.id: ast.unparse(node).partition(":")[2].strip()
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }


def parameters(function: Function) -> str:
    """Return a function's parameters without the annotations, as source text."""
    given = ast.parse(f"def f({ast.unparse(function.args)}): pass").body[0]
    assert isinstance(given, ast.FunctionDef)
    args = given.args
    for each in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if each is not None:
            each.annotation = None
    return ast.unparse(args)


def decorators(function: Function) -> tuple[str, ...]:
    """Return the names of a function's decorators."""
    return tuple(ast.unparse(each) for each in function.decorator_list)


def body(function: Function) -> str:
    """Return what a function does, as source text without its docstring."""
    statements = function.body
    first = statements[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        statements = statements[1:]
    return "\n".join(ast.unparse(each) for each in statements)


def text(function: Function) -> str:
    """Return a function's parameters and what it does."""
    return f"{parameters(function)}\n{body(function)}"


def simple_name(node: ast.expr) -> str:
    """Return the last part of a dotted name; an empty text for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
