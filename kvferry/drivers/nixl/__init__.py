"""NIXL: any of its backends, by its Python API. Imports the library when a transport is made."""

from kvferry.drivers.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
