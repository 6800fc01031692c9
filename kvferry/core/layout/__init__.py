"""A rank's cache described as data: regions, groups and fields, validated when they are built."""

from kvferry.core.layout.fields import (
    ELEMENT_BYTES,
    MAX_ENCODING,
    MAX_KEY,
    Axis,
    Dim,
    Field,
    axis,
    axis_length,
)
from kvferry.core.layout.layout import (
    HOLE,
    MAX_FIELDS,
    MAX_GROUPS,
    MAX_REGIONS,
    ContextParallel,
    Group,
    GroupKind,
    Layout,
)

__all__ = [
    "ELEMENT_BYTES",
    "HOLE",
    "MAX_ENCODING",
    "MAX_FIELDS",
    "MAX_GROUPS",
    "MAX_KEY",
    "MAX_REGIONS",
    "Axis",
    "ContextParallel",
    "Dim",
    "Field",
    "Group",
    "GroupKind",
    "Layout",
    "axis",
    "axis_length",
]
