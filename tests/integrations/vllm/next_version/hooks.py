"""The hooks of vLLM's connectors, and from where vLLM calls them in which order."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator

from tests.integrations.vllm.next_version import source as reading
from tests.integrations.vllm.next_version.comparison import Section
from tests.integrations.vllm.next_version.names import OURS
from tests.integrations.vllm.next_version.source import Source

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
CONNECTORS = "distributed/kv_transfer/kv_connector/v1/"
CALLERS = ("config", "distributed", "entrypoints", "platforms", "v1")
"""Folders of vLLM that call hooks."""

OTHER_CONNECTORS = ("ec_connector", "aux_output_connector", "weight_")
"""Objects of vLLM whose names also end in "connector", and which are none for KV cache."""

MACHINERY = (
    "distributed/kv_transfer",
    "v1/worker/gpu/kv_connector.py",
    "v1/worker/kv_connector_model_runner_mixin.py",
    "v1/outputs.py",
)
"""Where vLLM drives connectors and merges what workers report."""


def hooks(source: Source) -> dict[str, str]:
    """Return the methods of vLLM's base classes for connectors: how each is called, its default."""
    return {
        f"{name}.{method.name}": "\n".join(
            (
                " ".join((*reading.decorators(method), f"({reading.parameters(method)})")),
                *reading.body(method).splitlines(),
            )
        )
        for name, cls in source.classes(BASE).items()
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
    }


def hook_verdict(name: str, was: str | None, now: str | None) -> str:
    """Return what can be said without reading: nothing if the hook is new or called otherwise."""
    is_own = name.rpartition(".")[2] in own_hooks()
    if was is None or now is None:
        if was is None:
            return "`KVFerryConnector` defines it" if is_own else ""
        return "" if is_own else "not used"
    same_call = was.splitlines()[0] == now.splitlines()[0]
    return "`KVFerryConnector` does not use the default" if same_call and is_own else ""


@functools.cache
def own_hooks() -> frozenset[str]:
    """Return the names of the methods that ``KVFerryConnector`` defines."""
    connector = Source(OURS).classes("connector.py")["KVFerryConnector"]
    assigned = (name for name, _ in reading.assignments(connector.body))
    return frozenset((*assigned, *(name for name, _ in reading.functions(connector))))


def calls(source: Source) -> dict[str, str]:
    """Return which hooks each function calls, in order, each behind its conditions."""
    names = {name.rpartition(".")[2] for name in hooks(source)}
    names = {name for name in names if not name.startswith("_")}
    found = {}
    for path in source.files(*CALLERS, mentioning=("connector", "kv_transfer_group")):
        if not path.startswith(CONNECTORS):
            for name, function in reading.functions(source.tree(path)):
                happened = [each for node in function.body for each in _calls(node, names, "")]
                if happened:
                    found[f"{path}: {name}"] = "\n".join(happened)
    return found


def _calls(node: ast.AST, names: Collection[str], when: str) -> Iterator[str]:
    """Yield the hooks that a statement or expression calls, each behind its conditions."""
    if isinstance(node, reading.Function | ast.ClassDef):
        return
    if isinstance(node, ast.If):
        test = " ".join(ast.unparse(node.test).split())
        yield from _calls(node.test, names, when)
        for branch, condition in ((node.body, test), (node.orelse, f"not ({test})")):
            for each in branch:
                yield from _calls(each, names, f"if {condition}: ")
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, names, when)
    if isinstance(node, ast.Attribute) and node.attr in names and _is_connector(node.value):
        yield f"{when}{node.attr}"


def _is_connector(node: ast.expr) -> bool:
    text = ast.unparse(node).lower().removesuffix("()")
    named = text.endswith(("connector", "kv_transfer_group", "connector_cls"))
    return named and not any(other in text for other in OTHER_CONNECTORS)


def machinery(source: Source) -> dict[str, str]:
    """Return the functions around connectors, and the fields of what they report, by name."""
    found: dict[str, str] = {}
    for path in source.modules(*MACHINERY):
        if not path.startswith(CONNECTORS):
            for name, function in reading.functions(source.tree(path)):
                found[f"{path}: {name}"] = reading.text(function)
            for name, cls in source.classes(path).items():
                for field, text in reading.fields(cls).items():
                    found[f"{path}: {name}.{field}"] = text
    return found


SECTIONS = (
    Section(
        title="Hooks of the connector",
        look="`kvferry/integrations/vllm/connector.py`.",
        facts=hooks,
        verdict=hook_verdict,
    ),
    Section(
        title="Calls of hooks",
        look="`connector.py`, `scheduler.py` and `worker.py`: does the order that they count on "
        "still hold?",
        facts=calls,
    ),
    Section(
        title="What drives connectors",
        look="`scheduler.py` and `metadata.py` (`RankReport`).",
        facts=machinery,
        is_long=True,
    ),
)
