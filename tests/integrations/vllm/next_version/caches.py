"""What vLLM caches: specs and their fields, attention backends, formats of elements, orders."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator

from kvferry.integrations.vllm.caches.attention_pages import NEWER_PACKINGS, PACKINGS
from kvferry.integrations.vllm.caches.cache_kinds import HANDLED, REFUSED
from kvferry.integrations.vllm.caches.state_pages import STATE_PACKINGS
from tests.integrations.vllm.next_version import source as reading
from tests.integrations.vllm.next_version.comparison import CHANGED, Section
from tests.integrations.vllm.next_version.source import Source
from tests.vllm.caches import census

INTERFACE = "v1/kv_cache_interface.py"
REGISTRY = "v1/attention/backends/registry.py"
ENUMERATIONS = (INTERFACE, "v1/kv_cache_layout.py", REGISTRY)
LITERALS = "config/cache.py"
OPERATIONS = ("v1/attention/ops", "model_executor/layers/mamba")
"""The folders of kernels that several backends share, and of states."""

NATIVE = "csrc"
"""The folder of kernels in C++, beside the package in a source distribution."""

NATIVE_CACHE = re.compile(r"\b(slot_mapping|kv_cache|key_cache|k_cache)\b")
"""What a kernel in C++ calls a cache, or a token's place in it."""

TOUCHED = re.compile(r"cache|slot_mapping")
"""What a function names that has to do with caches."""

WRITERS = re.compile(r"cache|spec|layout|stride|shape|pack|compress|store|_kv_|shuffle|interleave")
"""What is in the name of a function that fills pages, or that says what pages look like."""

CHOOSERS = re.compile(r"^(supports_|get_cudagraph|autotune)|Builder\.")
"""Functions that choose a backend or prepare a step, whatever their name has."""


def spec_fields(source: Source) -> dict[str, str]:
    """Return the classes that describe caches, and their fields, as ``Class.field``."""
    found = {
        cls.simple: f"class {cls.simple}({' '.join(cls.bases)})"
        for cls in census.derived(census.SPEC_ROOT, source.root)
    }
    for name, cls in source.classes(INTERFACE).items():
        found |= {f"{name}.{field}": text for field, text in reading.fields(cls).items()}
    return found


def spec_verdict(name: str, was: str | None, now: str | None) -> str:
    """Return the verdict of the tables on a class; nothing on a field."""
    return HANDLED.get(name) or REFUSED.get(name, "")


def backends(source: Source) -> dict[str, str]:
    """Return the classes and orders of each attention backend, by its name."""
    return {
        backend.name: "\n".join(
            (
                *(".".join(path.split(".")[-2:]) for path in backend.classes),
                f"orders {' '.join(backend.orders)}",
            )
        )
        for backend in census.backends(source.root)
    }


def backend_verdict(name: str, was: str | None, now: str | None) -> str:
    """Return the verdict of the tables on a new backend; nothing on new classes of an old one."""
    known = {**PACKINGS, **NEWER_PACKINGS, **STATE_PACKINGS}
    return f"`{known[name].__name__}`" if was is None and name in known else ""


def kernels(source: Source) -> dict[str, str]:
    """Return the functions of each module that fill pages, each with a digest of what it does."""
    packings = (*PACKINGS, *NEWER_PACKINGS, *STATE_PACKINGS)
    described = {name.partition("/")[0] for name in packings}
    paths = {*source.files(*OPERATIONS)} | {
        path
        for backend in census.backends(source.root)
        if backend.name in described
        for cls in backend.classes
        if (path := source.module_path(cls.rpartition(".")[0]))
    }
    return {path: "\n".join(_writers(source, path)) for path in paths}


def _writers(source: Source, path: str) -> Iterator[str]:
    for name, function in reading.functions(source.tree(path)):
        text, simple = reading.text(function), name.rpartition(".")[2]
        chooses = CHOOSERS.search(name) or CHOOSERS.search(simple)
        if WRITERS.search(simple) and TOUCHED.search(text) and not chooses:
            yield f"{name} {hashlib.blake2b(text.encode(), digest_size=2).hexdigest()}"


def native_kernels(source: Source) -> dict[str, str]:
    """Return the files in C++ that mention a cache; none unless it is a source distribution."""
    folder = source.root.parent / NATIVE
    return {
        path.relative_to(folder.parent).as_posix(): text
        for path in folder.rglob("*")
        if path.suffix in (".cu", ".cuh", ".cpp", ".hpp", ".h")
        if NATIVE_CACHE.search(text := path.read_text(encoding="utf-8", errors="replace"))
        if "bindings" not in path.name
    }


def values(source: Source) -> dict[str, str]:
    """Return the members of enumerations and of types that list their values."""
    found = {}
    for path in ENUMERATIONS:
        for name, cls in source.classes(path).items():
            if any("Enum" in ast.unparse(base) for base in cls.bases):
                for member, value in reading.assignments(cls.body):
                    found[f"{name}.{member}"] = ast.unparse(value) if value else ""
    for name, value in source.constants(LITERALS).items():
        if isinstance(value, ast.Subscript) and reading.simple_name(value.value) == "Literal":
            for each in ast.walk(value.slice):
                if isinstance(each, ast.Constant):
                    found[f"{name} {each.value!r}"] = repr(each.value)
    return found


FILLS = "`caches/attention_pages.py`: do these still fill pages as described?"

SECTIONS = (
    Section(
        title="Specs of caches",
        look="`caches/cache_kinds.py`; a field may change what the bytes of a page mean.",
        facts=spec_fields,
        verdict=spec_verdict,
    ),
    Section(
        title="Attention backends",
        look="`caches/attention_pages.py`, `caches/state_pages.py`; a class that is new under a "
        "known name may fill its pages in another way.",
        facts=backends,
        verdict=backend_verdict,
    ),
    Section(title="Functions that fill pages", look=FILLS, facts=kernels, counts=(CHANGED,)),
    Section(title="Kernels in C++", look=FILLS, facts=native_kernels, is_long=True),
    Section(
        title="Quantised formats, orders and other values",
        look="`caches/layer_facts.py` and `caches/attention_pages.py`.",
        facts=values,
    ),
)
