"""The hooks of vLLM's connectors, and from where vLLM calls them in which order."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from tests.integrations.vllm.next_version import source as reading
from tests.integrations.vllm.next_version.findings import (
    Finding,
    Section,
    changed_texts,
    changed_values,
    code,
    described_change,
)
from tests.integrations.vllm.next_version.source import Source

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
CONNECTORS = "distributed/kv_transfer/kv_connector/v1/"
CALLERS = ("config", "distributed", "entrypoints", "platforms", "v1")
"""Folders of vLLM that call hooks."""

Calls = tuple[str, ...]
"""The hooks that a function calls, in order, each behind its condition."""

OTHER_CONNECTORS = ("ec_connector", "aux_output_connector", "weight_")
"""Objects of vLLM whose names also end in "connector", and which are none for KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A method of one of vLLM's base classes for connectors."""

    parameters: str
    kind: tuple[str, ...]
    default: str
    doc: str


def hooks(source: Source) -> dict[str, Hook]:
    """Return the hooks of a vLLM by class and name, such as ``SupportsHMA.request_finished``."""
    return {
        f"{name}.{method.name}": Hook(
            parameters=reading.parameters(method),
            kind=reading.decorators(method),
            default=reading.body(method),
            doc=reading.documented(method),
        )
        for name, cls in source.classes(BASE).items()
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
    }


def hook_section(old: Source, new: Source, defined: Collection[str]) -> Section:
    before, after = hooks(old), hooks(new)
    found = []
    for name in sorted({*before, *after}):
        was, now = before.get(name), after.get(name)
        change = "; ".join(_hook_changes(was, now))
        if change:
            own = name.rpartition(".")[2] in defined
            found.append(Finding(name=name, change=change, verdict=_hook_verdict(was, now, own)))
    return Section(
        title="Hooks of the connector",
        look="`kvferry/integrations/vllm/connector.py`",
        findings=tuple(found),
    )


def _hook_changes(was: Hook | None, now: Hook | None) -> Iterator[str]:
    if was is None and now is not None:
        kind = "".join(f"{each} " for each in now.kind)
        default = f"; by default {code(now.default)}" if now.default else ""
        yield f"new: {code(f'{kind}({now.parameters})')}{default}. {now.doc}".strip()
    elif now is None:
        yield "gone"
    elif was is not None:
        for what in ("parameters", "kind", "default"):
            before, after = (_text(getattr(hook, what)) for hook in (was, now))
            if before != after:
                yield f"{what}: {described_change(before, after)}"


def _text(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _hook_verdict(was: Hook | None, now: Hook | None, own: bool) -> str:
    """Return what can be said without reading: nothing if the hook is new or called otherwise."""
    if now is None and not own:
        return "not used"
    if was is None and own:
        return "`KVFerryConnector` defines it"
    same_call = was and now and (was.parameters, was.kind) == (now.parameters, now.kind)
    return "`KVFerryConnector` does not use the default" if same_call and own else ""


def call_section(old: Source, new: Source) -> Section:
    """Compare the order in which each function of vLLM calls hooks, and under which conditions."""
    names = {name.rpartition(".")[2] for each in (old, new) for name in hooks(each)}
    names = {name for name in names if not name.startswith("_")}
    before, after = calls(old, names), calls(new, names)
    found = [
        Finding(name=name, change="; ".join(_order_changes(was, now)))
        for name, was, now in changed_values(before, after)
    ]
    return Section(
        title="Calls of hooks",
        look="`connector.py`, `scheduler.py` and `worker.py`: does the order that they count on "
        "still hold?",
        findings=tuple(found),
    )


def _order_changes(was: Calls | None, now: Calls | None) -> Iterator[str]:
    """Yield what changed in the order of a function's calls, as text."""
    if was is None or now is None:
        yield f"{'new' if was is None else 'gone'}: {_listed(was or now or ())}"
        return
    for tag, at, end, new_at, new_end in SequenceMatcher(a=was, b=now).get_opcodes():
        if tag == "insert":
            before = _listed(was[at - 1 : at]) or "nothing"
            yield f"also {_listed(now[new_at:new_end])} after {before}"
        elif tag != "equal":
            yield f"{_listed(was[at:end])} became {_listed(now[new_at:new_end]) or 'nothing'}"


def _listed(calls: Calls) -> str:
    return ", ".join(code(each) for each in calls)


def calls(source: Source, names: Collection[str]) -> dict[str, Calls]:
    """Return which hooks each function calls, in order, each with its conditions."""
    found = {}
    for path in source.files(*CALLERS, mentioning=("connector", "kv_transfer_group")):
        if not path.startswith(CONNECTORS):
            for name, function in reading.functions(source.tree(path)):
                happened = [each for node in function.body for each in _calls(node, names, "")]
                if happened:
                    found[f"{path}: {name}"] = tuple(happened)
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


MACHINERY = (
    "distributed/kv_transfer",
    "v1/worker/gpu/kv_connector.py",
    "v1/worker/kv_connector_model_runner_mixin.py",
    "v1/outputs.py",
)
"""Where vLLM drives connectors and merges what workers report."""


def machinery_section(old: Source, new: Source) -> Section:
    """Compare the functions by which vLLM drives connectors and merges their reports."""
    return Section(
        title="What drives connectors",
        look="`scheduler.py` and `metadata.py` (`RankReport`)",
        findings=changed_texts(_machinery(old), _machinery(new)),
    )


def _machinery(source: Source) -> dict[str, str]:
    """Return the functions around connectors, and the fields of what they report, by name."""
    found: dict[str, str] = {}
    for place in MACHINERY:
        paths = source.files(place) if not place.endswith(".py") else [place]
        for path in paths:
            if path.startswith(CONNECTORS):
                continue
            for name, function in reading.functions(source.tree(path)):
                found[f"{path}: {name}"] = (
                    f"{reading.parameters(function)}\n{reading.body(function)}"
                )
            for name, cls in source.classes(path).items():
                for field, text in reading.fields(cls).items():
                    found[f"{path}: {name}.{field}"] = text
    return found
