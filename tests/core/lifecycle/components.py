"""What a simulation is made of, with a planted fault in place of one part of it."""

from __future__ import annotations

from typing import TypeVar, cast

T = TypeVar("T")


class Components:
    """The classes that a simulation is made of; a planted ``fault`` replaces one of them.

    Without ``strict``, nothing is compared with the protocol table.
    """

    def __init__(self, fault: type | None = None, *, strict: bool = True) -> None:
        self.strict = strict
        self._fault = fault
        bases = () if fault is None else fault.__mro__
        self._replaced = next((base for base in bases if base.__module__ != fault.__module__), None)

    def of(self, original: type[T]) -> type[T]:
        """Return the class to use in place of this one."""
        return cast(type[T], self._fault) if original is self._replaced else original
