"""What vLLM caches: specs and their fields, attention backends, formats of elements, orders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from kvferry.integrations.vllm.caches.attention_pages import (
    NEWER_PACKINGS,
    PACKINGS,
    packing_of,
    unknown,
)
from kvferry.integrations.vllm.caches.cache_specs import SPECS
from kvferry.integrations.vllm.caches.state_pages import STATE_PACKINGS
from tests.integrations.vllm.next_version import source as reading
from tests.integrations.vllm.next_version.findings import (
    Finding,
    Section,
    changed_texts,
    changed_values,
    described_changes,
)
from tests.integrations.vllm.next_version.source import Source
from tests.vllm.caches import census

INTERFACE = "v1/kv_cache_interface.py"
REGISTRY = "v1/attention/backends/registry.py"
ENUMERATIONS = (INTERFACE, "v1/kv_cache_layout.py", REGISTRY)
LITERALS = ("config/cache.py",)
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


def spec_section(old: Source, new: Source) -> Section:
    """Compare the classes that describe caches, and their fields."""
    return Section(
        title="Specs of caches",
        look="`caches/cache_specs.py`; a field may change what the bytes of a page mean",
        findings=described_changes(_spec_fields(old), _spec_fields(new), _spec_verdict),
    )


def _spec_fields(source: Source) -> dict[str, str]:
    """Return the classes and their fields, as ``Class`` and ``Class.field``."""
    found = {
        cls.simple: f"class {cls.simple}({' '.join(cls.bases)})"
        for cls in census.derived(census.SPEC_ROOT, source.root)
    }
    for name, cls in source.classes(INTERFACE).items():
        found |= {f"{name}.{field}": text for field, text in reading.fields(cls).items()}
    return found


def _spec_verdict(name: str) -> str:
    """Return the verdict of the table on a class; nothing on a field."""
    known = SPECS.get(name)
    return f"{known.handling.value}: {known.why}" if known else ""


def backend_section(old: Source, new: Source) -> Section:
    """Compare the attention backends: their names, classes and orders, and what they can be."""
    before, after = _backends(old), _backends(new)

    def verdict(name: str) -> str:
        return "" if name in before else _backend_verdict(name)

    return Section(
        title="Attention backends",
        look="`caches/attention_pages.py`, `caches/state_pages.py`; a class that is new under a "
        "known name may fill its pages in another way",
        findings=described_changes(before, after, verdict),
    )


def _backends(source: Source) -> dict[str, str]:
    """Return the classes and orders of each backend, by name."""
    return {
        backend.name: f"{' '.join(_short(path) for path in backend.classes)}, orders "
        f"{' '.join(backend.orders)}"
        for backend in census.backends(source.root)
    }


def _short(path: str) -> str:
    """Return a class's name with its module's, such as ``flash_attn.FlashAttentionBackend``."""
    return ".".join(path.split(".")[-2:])


def _backend_verdict(name: str) -> str:
    """Return the verdict of the tables on a backend; nothing if it is in none."""
    if packing := packing_of(name):
        return f"{'opaque' if packing.fields is unknown else 'described'}: {packing.inside}"
    return "described" if name in STATE_PACKINGS else ""


def kernel_section(old: Source, new: Source) -> Section:
    """Compare the Python functions that fill pages, in modules that both have."""
    found = []
    for path in sorted(_kernel_modules(old) & _kernel_modules(new)):
        before, after = _cache_functions(old, path), _cache_functions(new, path)
        changed = [
            name
            for name, was, now in changed_values(before, after)
            if was is not None and now is not None
        ]
        added = [name for name in after if name not in before]
        parts = [("changed", changed), ("new", added)]
        change = "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)
        if change:
            found.append(Finding(name=path, change=change))
    return Section(
        title="Functions that fill pages",
        look="`caches/attention_pages.py`: do these functions still fill pages as described?",
        findings=tuple(found),
    )


def _kernel_modules(source: Source) -> set[str]:
    """Return the paths of kernels, and of the backends whose pages are described."""
    return set(source.files(*OPERATIONS)) | {
        path
        for backend in census.backends(source.root)
        if (backend.name in STATE_PACKINGS or _is_described(backend.name))
        for cls in backend.classes
        if (path := source.module_path(cls.rpartition(".")[0]))
    }


def _is_described(name: str) -> bool:
    known = {**PACKINGS, **NEWER_PACKINGS}
    named = [each for full, each in known.items() if full.partition("/")[0] == name]
    return any(packing.fields is not unknown for packing in named)


def native_section(old: Source, new: Source) -> Section:
    """Compare the files in C++ that have to do with caches; both must be source distributions."""
    before, after = _native_files(old), _native_files(new)
    missing = Finding(name=NATIVE, change="not compared: not both are source distributions")
    return Section(
        title="Kernels in C++",
        look="`caches/attention_pages.py`: do these kernels still fill pages as described?",
        findings=changed_texts(before, after) if before and after else (missing,),
    )


def _native_files(source: Source) -> dict[str, str]:
    """Return the texts of the files in C++ that mention a cache, by path."""
    folder = source.root.parent / NATIVE
    return {
        path.relative_to(folder.parent).as_posix(): text
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".cu", ".cuh", ".cpp", ".hpp", ".h")
        if NATIVE_CACHE.search(text := path.read_text(encoding="utf-8", errors="replace"))
        if "bindings" not in path.name
    }


def _cache_functions(source: Source, path: str) -> Mapping[str, str]:
    """Return the functions of a module that fill pages, by name, without docstrings."""
    found = {}
    for name, function in reading.functions(source.tree(path)):
        text = f"{reading.parameters(function)}\n{reading.body(function)}"
        simple = name.rpartition(".")[2]
        chooses = CHOOSERS.search(name) or CHOOSERS.search(simple)
        if WRITERS.search(simple) and TOUCHED.search(text) and not chooses:
            found[name] = text
    return found


def value_section(old: Source, new: Source) -> Section:
    """Compare the members of enumerations and of types that list their values."""
    return Section(
        title="Quantised formats, orders and other values",
        look="`caches/layer_facts.py` and `caches/attention_pages.py`",
        findings=described_changes(dict(_values(old)), dict(_values(new))),
    )


def _values(source: Source) -> Iterator[tuple[str, str]]:
    """Yield the members of enumerations and literal types, with their values."""
    for path in ENUMERATIONS:
        for name, cls in source.classes(path).items():
            if _is_enumeration(cls):
                for member, value in reading.assignments(cls.body):
                    yield f"{name}.{member}", ast.unparse(value) if value else ""
    for path in LITERALS:
        for name, value in source.constants(path).items():
            if isinstance(value, ast.Subscript) and reading.simple_name(value.value) == "Literal":
                for each in ast.walk(value.slice):
                    if isinstance(each, ast.Constant):
                        yield f"{name} {each.value!r}", repr(each.value)


def _is_enumeration(cls: ast.ClassDef) -> bool:
    return any("Enum" in ast.unparse(base) for base in cls.bases)
