"""What of vLLM has to have a verdict: every kind of cache and every attention backend it has.

Most backends cannot be imported without a GPU, so that vLLM's source is read instead: that of the
installed vLLM, or of another one in a folder.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BACKEND_ROOT = "AttentionBackend"
SPEC_ROOT = "KVCacheSpec"
ANY = ("any",)

MENTIONED = re.compile(r"class \w+\([^)]*(Backend|Spec)\b|create_composite_attention_backend\(")
"""What a file must hold to be worth parsing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """A class in vLLM's source."""

    path: str  # dotted, from vllm on
    bases: tuple[str, ...]  # simple names
    name: str | None = None  # what get_name() returns, if it is defined here
    # what supported_kv_cache_layouts() names, if it is defined here; ANY also where it defers to
    # the default
    orders: tuple[str, ...] | None = None
    state: bool = False  # it is a backend of states (is_ssm)

    @property
    def simple(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One name that ``get_name()`` can return, and the classes that return it."""

    name: str
    classes: tuple[str, ...]
    orders: tuple[str, ...]
    state: bool


@functools.cache
def backends(root: Path | None = None) -> tuple[Backend, ...]:
    """By name. Base classes that have no name of their own, and no heir's, are left out."""
    root = root or installed()
    found: dict[str, list[Class]] = {}
    for cls in derived(BACKEND_ROOT, root):
        name = inherited(cls, "name", root)
        if isinstance(name, str):
            found.setdefault(name, []).append(cls)
    for path, name in _composites(root):
        found.setdefault(name, []).append(Class(path=path, bases=(), orders=ANY))
    return tuple(_backend(name, found[name], root) for name in sorted(found))


def _backend(name: str, classes: list[Class], root: Path) -> Backend:
    orders = {order for cls in classes for order in _orders_of(cls, root)}
    return Backend(
        name=name,
        classes=tuple(sorted(cls.path for cls in classes)),
        orders=tuple(sorted(orders - set(ANY))) + (ANY if ANY[0] in orders else ()),
        state=any(inherited(cls, "state", root) for cls in classes),
    )


def _orders_of(cls: Class, root: Path) -> tuple[str, ...]:
    found = inherited(cls, "orders", root)
    return found if isinstance(found, tuple) else ANY


def derived(ancestor: str, root: Path | None = None) -> tuple[Class, ...]:
    """Every class that derives from one of this name, directly or not."""
    by_base: dict[str, list[Class]] = {}
    for cls in classes(root or installed()):
        for base in cls.bases:
            by_base.setdefault(base, []).append(cls)
    found: dict[str, Class] = {}
    names = [ancestor]
    while names:
        for cls in by_base.get(names.pop(), []):
            if cls.path not in found:
                found[cls.path] = cls
                names.append(cls.simple)
    return tuple(found.values())


def inherited(cls: Class, attribute: str, root: Path | None = None) -> object:
    """An attribute of a class or else of its nearest ancestor that says it."""
    root = root or installed()
    own = getattr(cls, attribute)
    if own:
        return own
    for base in cls.bases:
        if base in (BACKEND_ROOT, SPEC_ROOT):
            continue
        known = [other for other in _by_name(root).get(base, []) if other is not cls]
        near = [o for o in known if o.path.rpartition(".")[0] == cls.path.rpartition(".")[0]]
        for other in near or known:
            if found := inherited(other, attribute, root):
                return found
    return None


@functools.cache
def _by_name(root: Path) -> dict[str, list[Class]]:
    named: dict[str, list[Class]] = {}
    for cls in classes(root):
        named.setdefault(cls.simple, []).append(cls)
    return named


@functools.cache
def classes(root: Path) -> tuple[Class, ...]:
    """Every class in vLLM's source that may be a backend or a spec."""
    return tuple(cls for _, path, tree in _trees(root) for cls in _classes(path, tree))


def _classes(module: str, tree: ast.Module) -> Iterator[Class]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.bases:
            methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
            yield Class(
                path=f"{module}.{node.name}",
                bases=tuple(base for b in node.bases if (base := _simple(b))),
                name=_returned(methods.get("get_name")),
                orders=_orders(methods.get("supported_kv_cache_layouts")),
                state="is_ssm" in methods,
            )


def _composites(root: Path) -> Iterator[tuple[str, str]]:
    """Backends that ``create_composite_attention_backend`` makes of two others."""
    for _, module, tree in _trees(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _simple(node.func) == (
                "create_composite_attention_backend"
            ):
                given = {k.arg: k.value for k in node.keywords}
                name, backend = given["name"], given["backend_name"]
                yield f"{module}.{ast.literal_eval(name)}", str(ast.literal_eval(backend))


def _simple(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _returned(method: ast.FunctionDef | None) -> str | None:
    for node in ast.walk(method) if method else ():
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return None


def _orders(method: ast.FunctionDef | None) -> tuple[str, ...] | None:
    if method is None:
        return None
    nodes = list(ast.walk(method))
    named = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and _simple(node.value) == "KVCacheLayout"
    }
    defers = any(isinstance(n, ast.Call) and _simple(n.func) == "super" for n in nodes)
    return tuple(sorted(named)) + (ANY if defers or not named else ())


@functools.cache
def installed() -> Path:
    """The folder of the installed vLLM, which is found without importing it."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("vLLM is not installed", name="vllm")
    return Path(found.origin).parent


@functools.cache
def _trees(root: Path) -> tuple[tuple[Path, str, ast.Module], ...]:
    return tuple(
        (path, ".".join(("vllm", *path.relative_to(root).with_suffix("").parts)), ast.parse(text))
        for path in sorted(root.rglob("*.py"))
        if MENTIONED.search(text := path.read_text(encoding="utf-8"))
    )
