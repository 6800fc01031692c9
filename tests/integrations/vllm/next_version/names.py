"""Names that kvferry shares with vLLM: tickets, connectors, imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from kvferry.integrations.vllm.checks import TICKET_CONNECTORS
from tests.integrations.vllm.next_version import source as reading
from tests.integrations.vllm.next_version.comparison import Section
from tests.integrations.vllm.next_version.source import Source

OURS = Path(__file__).parents[4] / "kvferry" / "integrations" / "vllm"
NIXL = "distributed/kv_transfer/kv_connector/v1/nixl"
FACTORY = "distributed/kv_transfer/kv_connector/factory.py"
PARAMS = ("kv_transfer_params", "params")
"""What tickets are called; only NixlConnector uses the second name for nothing else."""

TICKET_KEY = "remote_block_ids"
"""A key that every ticket has."""


def ticket_keys(source: Source) -> dict[str, str]:
    """Return the keys of ``kv_transfer_params``, each with the folders that name it."""
    found: dict[str, set[str]] = {}
    for path in source.files(NIXL, "v1", "entrypoints", mentioning=PARAMS):
        place, params = ("NixlConnector", PARAMS) if path.startswith(NIXL) else (path, PARAMS[:1])
        for node in ast.walk(source.tree(path)):
            for key in _keys(node, params):
                found.setdefault(key, set()).add(place)
    version = source.constants(f"{NIXL}/metadata.py").get("NIXL_CONNECTOR_VERSION")
    return {key: "\n".join(sorted(places)) for key, places in found.items()} | (
        {"NIXL_CONNECTOR_VERSION": ast.unparse(version)} if version is not None else {}
    )


def _keys(node: ast.AST, params: Collection[str]) -> Iterator[str]:
    """Yield the keys of tickets that an expression reads, sets or makes."""
    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in ("get", "pop") and node.args:
            yield from _constant(node.args[0], func.value, params)
        if reading.simple_name(func) == "dict" and TICKET_KEY in {k.arg for k in node.keywords}:
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
    if isinstance(node, ast.Subscript):
        yield from _constant(node.slice, node.value, params)


def _constant(key: ast.expr, value: ast.expr, params: Collection[str]) -> Iterator[str]:
    """Yield a constant key of an object that is called as params are."""
    if reading.simple_name(value) in params and isinstance(key, ast.Constant):
        yield str(key.value)


def connectors(source: Source) -> dict[str, str]:
    """Return the module of each connector that vLLM registers."""
    found = {}
    for node in ast.walk(source.tree(FACTORY)):
        if isinstance(node, ast.Call) and reading.simple_name(node.func) == "register_connector":
            name, module, *_ = (ast.literal_eval(each) for each in node.args)
            found[str(name)] = str(module)
    return found


def connector_verdict(name: str, was: str | None, now: str | None) -> str:
    return "in `TICKET_CONNECTORS`" if name in TICKET_CONNECTORS else ""


def imports(source: Source) -> dict[str, str]:
    """Return what kvferry imports of vLLM: where it is, and how it is called."""
    ours = Source(OURS)
    wanted = {
        (node.module, alias.name)
        for path in ours.files()
        for node in ast.walk(ours.tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }
    return {
        f"{module}.{name}": text
        for module, name in wanted
        if module is not None and (text := _definition(source, module, name)) is not None
    }


def _definition(source: Source, module: str, name: str) -> str | None:
    """Return how a name is called, if it is a function; what it is otherwise."""
    path = source.module_path(module)
    if path is None:
        return None
    for node in source.tree(path).body:
        if isinstance(node, reading.Function) and node.name == name:
            return f"{name}({reading.parameters(node)})"
        if isinstance(node, ast.ClassDef) and node.name == name:
            return "a class"
    if source.module_path(f"{module}.{name}"):
        return "a module"
    named = re.search(rf"\b{re.escape(name)}\b", (source.root / path).read_text(encoding="utf-8"))
    return "named" if named else None


SECTIONS = (
    Section(
        title="Keys of tickets",
        look="`ticket_format.py`; what vLLM itself and routers do with a key.",
        facts=ticket_keys,
    ),
    Section(
        title="Connectors",
        look="`checks.py`: does it make tickets with the same keys (`TICKET_CONNECTORS`)?",
        facts=connectors,
        verdict=connector_verdict,
    ),
    Section(
        title="Names that kvferry imports",
        look="the imports of `kvferry/integrations/vllm`.",
        facts=imports,
    ),
)
