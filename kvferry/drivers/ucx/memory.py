"""What a transport has registered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kvferry.core.errors import TransportError
from kvferry.core.memory import Region
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.address import MAX_REGIONS, KeyId, UcxRegion
from kvferry.drivers.ucx.ucp import Context, Memory, Ucp


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A region, as UCX has it.

    Attributes:
        key: its name among all there ever were.
        memory: UCX's handle.
        packed: what peers need to reach it.
        params: of requests that move bytes from it or to it.
    """

    key: KeyId
    memory: Memory
    packed: bytes
    params: structs.RequestParams


class RegisteredMemory:
    """The regions; not for two threads at once."""

    def __init__(self, library: Ucp, context: Context) -> None:
        self._ucp = library
        self._context = context
        self._ids = itertools.count(1)
        self._found: dict[Region, Registration] = {}

    def __contains__(self, region: object) -> bool:
        return region in self._found

    def __iter__(self) -> Iterator[Region]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, region: Region) -> KeyId:
        """Register one that is not.

        Raises:
            TransportError: UCX refuses, or there are too many.
        """
        if len(self._found) >= MAX_REGIONS:
            raise TransportError(
                f"{MAX_REGIONS} regions are registered, and an address holds no more: "
                "deregister some, or register what they lie in"
            )
        memory = self._ucp.map(self._context, region.address, region.nbytes, region.kind)
        registration = Registration(
            key=KeyId(next(self._ids)),
            memory=memory,
            packed=self._ucp.pack(self._context, memory),
            params=structs.RequestParams.of(memh=memory),
        )
        self._found[region] = registration
        return registration.key

    def take(self, region: Region) -> Registration:
        """Forget one, which ``release`` then undoes."""
        return self._found.pop(region)

    def release(self, registration: Registration) -> None:
        """Let UCX forget it, too; nothing uses it any more."""
        self._ucp.unmap(self._context, registration.memory)

    def params(self, region: Region) -> int:
        """The address of its requests' parameters."""
        return structs.address_of(self._found[region].params)

    def told(self) -> list[UcxRegion]:
        """What peers are told."""
        return [
            UcxRegion(region.address, region.nbytes, region.kind, region.device, r.key, r.packed)
            for region, r in self._found.items()
        ]

    def close(self) -> None:
        """Undo them all."""
        for registration in self._found.values():
            with suppress(TransportError):
                self.release(registration)
