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
    """What belongs to one registered region.

    Attributes:
        key: names this registration among all that the transport ever made.
        memory: UCX's handle.
        packed: UCX's packed key, with which peers reach the region.
        params: the parameters of requests that move bytes from the region or to it. Requests are
            given the address of this structure, so it lives as long as the registration.
    """

    key: KeyId
    memory: Memory
    packed: bytes
    params: structs.RequestParams


class RegisteredMemory:
    """The registrations of one transport. Not for use by two threads at once.

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
        """Register a region that is not registered.

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
        """Remove a region from the registered ones. UCX keeps it until ``unmap`` is called."""
        return self._registrations.pop(region)

    def unmap(self, registration: Registration) -> None:
        """Undo a registration at UCX. Nothing may use the region any more."""
        self._ucp.unmap(self._context, registration.memory)

    def params_address(self, region: Region) -> int:
        """Return the address of the request parameters of a registered region."""
        return structs.address_of(self._registrations[region].params)

    def described(self) -> list[UcxRegion]:
        """Return the registered regions as an address carries them."""
        return [
            UcxRegion(region.address, region.nbytes, region.kind, region.device, r.key, r.packed)
            for region, r in self._registrations.items()
        ]

    def close(self) -> None:
        """Undo every registration."""
        for registration in self._registrations.values():
            with suppress(TransportError):
                self.unmap(registration)
