"""The regions that a transport has registered with UCX."""

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
    """One registration of a region with UCX.

    Attributes:
        key: the number of the registration, which this transport uses only once.
        memory: UCX's handle of the registered memory.
        packed: UCX's packed key, with which peers reach the region.
        params: UCX's request parameters for reads into the region and writes from it. UCX gets the
            address of this structure, so the registration keeps it alive.
    """

    key: KeyId
    memory: Memory
    packed: bytes
    params: structs.RequestParams


class RegisteredMemory:
    """The registrations of one transport. Two threads must not use it at once.

    Args:
        ucp: the library.
        context: the transport's context.
    """

    def __init__(self, ucp: Ucp, context: Context) -> None:
        self._ucp = ucp
        self._context = context
        self._ids = itertools.count(1)
        self._registrations: dict[Region, Registration] = {}

    def __contains__(self, region: object) -> bool:
        return region in self._registrations

    def __iter__(self) -> Iterator[Region]:
        return iter(self._registrations)

    def __len__(self) -> int:
        return len(self._registrations)

    def register(self, region: Region) -> KeyId:
        """Register a region that is not registered yet.

        Returns:
            The key of the registration.

        Raises:
            TransportError: UCX refuses, or too many regions are registered.
        """
        if len(self._registrations) >= MAX_REGIONS:
            raise TransportError(
                f"{MAX_REGIONS} regions are registered, and an address holds no more: "
                "deregister some, or register what they lie in"
            )
        memory = self._ucp.map(self._context, region.address, region.nbytes, region.kind)
        registration = Registration(
            key=KeyId(next(self._ids)),
            memory=memory,
            packed=self._ucp.pack_key(self._context, memory),
            params=structs.RequestParams.of(memh=memory),
        )
        self._registrations[region] = registration
        return registration.key

    def remove(self, region: Region) -> Registration:
        """Forget a registered region, and return its registration, which ``unmap`` then undoes."""
        return self._registrations.pop(region)

    def unmap(self, registration: Registration) -> None:
        """Undo a registration with UCX, once no peer and no transfer uses the region any more."""
        self._ucp.unmap(self._context, registration.memory)

    def params_address(self, region: Region) -> int:
        """Return the address of the request parameters of a registered region."""
        return structs.address_of(self._registrations[region].params)

    def described(self) -> list[UcxRegion]:
        """Return the registered regions in the form in which ``UcxAddress`` lists them."""
        return [
            UcxRegion(region.address, region.nbytes, region.kind, region.device, r.key, r.packed)
            for region, r in self._registrations.items()
        ]

    def close(self) -> None:
        """Undo every registration with UCX."""
        for registration in self._registrations.values():
            with suppress(TransportError):
                self.unmap(registration)
