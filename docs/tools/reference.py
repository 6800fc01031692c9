"""Write the parts of the reference that are generated: settings and commands, as Markdown."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as types

from kvferry.integrations.vllm import config


def settings(place: str) -> str:
    """Return a Markdown table of the settings that are the fields of ``module:Class``.

    Raises:
        ValueError: a setting is missing in the docstring's section ``Attributes``, or the class is
            neither a dataclass nor a msgspec struct.
    """
    found = _find(place)
    info = types.type_info(found)
    if not isinstance(info, types.DataclassType | types.StructType):
        raise ValueError(f"{place} is neither a dataclass nor a struct")
    said = attributes(inspect.getdoc(found) or "")
    missing = [field.name for field in info.fields if field.name not in said]
    if missing:
        raise ValueError(f"{place}: no word on {', '.join(missing)} under Attributes")
    rows = [
        f"| `{field.name}` | {_type(field.type)} | {_default(field)} | {said[field.name]} |"
        for field in info.fields
    ]
    return "\n".join(("| key | value | default | what it does |", "|---|---|---|---|", *rows))


def commands(place: str) -> str:
    """Return a section of Markdown for a typer app, ``module:app``, and each of its commands."""
    import typer

    # typer builds its commands from a copy of click, whose types are not public.
    group: Any = typer.main.get_command(_find(place))
    context = group.context_class(group, info_name=group.name)
    sections = [_command(group, context, "")]
    for name in sorted(group.commands):
        command = group.commands[name]
        inner = command.context_class(command, info_name=name, parent=context)
        sections.append(_command(command, inner, f"{group.name} {name}"))
    return "\n\n".join(sections)


def attributes(docstring: str) -> dict[str, str]:
    """Return the descriptions in the ``Attributes`` section of a docstring, each on one line."""
    found = config.attributes(docstring)
    return {name: _cell(text) for name, text in found.items()}


def _find(place: str) -> Any:  # noqa: ANN401  whatever the module has by that name
    """Return the object that ``module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _cell(text: str) -> str:
    """Return text for a cell of a Markdown table: with a capital first letter, and bars escaped."""
    text = text.replace("``", "`").replace("|", "\\|")
    return text[:1].upper() + text[1:]


def _type(info: types.Type) -> str:
    """Return a setting's type and its bounds in words."""
    match info:
        case types.BoolType():
            return "true or false"
        case types.IntType():
            return "whole number" + _bounds(info.gt, info.ge, info.lt, info.le)
        case types.FloatType():
            return "number" + _bounds(info.gt, info.ge, info.lt, info.le)
        case types.StrType():
            return "text"
        case types.NoneType():
            return "null"
        case types.ListType() | types.VarTupleType():
            return f"list of {_type(info.item_type)}"
        case types.DictType():
            return "object"
        case types.UnionType():
            some = [_type(each) for each in info.types if not isinstance(each, types.NoneType)]
            return " or ".join(some)
        case _:
            return "any"


def _bounds(gt: float | None, ge: float | None, lt: float | None, le: float | None) -> str:
    """Return the bounds of a number in words, after a comma; empty if there are none."""
    low = f"{ge:,}" if ge is not None else f"above {gt:,}" if gt is not None else ""
    high = f"{le:,}" if le is not None else f"below {lt:,}" if lt is not None else ""
    if low and high:
        return f", {low} to {high}"
    return f", {low or high}" if low or high else ""


def _default(field: types.Field) -> str:
    """Return a setting's default as JSON, "none" for an empty one, or "" if it has no default."""
    if field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        return ""
    return "none" if value in ((), None, "", [], {}) else f"`{msgspec.json.encode(value).decode()}`"


def _command(command: Any, context: object, title: str) -> str:  # noqa: ANN401 - of typer
    """Return a command's section: its usage, its help, its parameters, its own commands."""
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [f"## {title}"] if title else []
    parts += [f"```\n{' '.join(usage.split())}\n```", *_paragraphs(command.help or "")]
    records = [each.get_help_record(context) for each in command.get_params(context)]
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in filter(None, records)]
    if rows:
        parts.append("\n".join(("| argument or option | what it does |", "|---|---|", *rows)))
    if inner := getattr(command, "commands", None):
        rows = [f"- [`{name}`](#{command.name}-{name}): {_first(inner[name])}" for name in inner]
        parts.append("\n".join(sorted(rows)))
    return "\n\n".join(parts)


def _paragraphs(text: str) -> Iterator[str]:
    r"""Yield the paragraphs of a help text, as code if typer must not rewrap them (``\b``)."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        yield f"```\n{paragraph[2:]}\n```" if paragraph.startswith("\b\n") else paragraph


def _first(command: Any) -> str:  # noqa: ANN401 - of typer
    return str(command.help or "").partition("\n\n")[0].replace("\n", " ")
