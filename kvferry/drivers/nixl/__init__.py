"""The driver for NIXL: any of its backends, by its Python API.

The library is imported when a transport is made.
"""

from kvferry.drivers.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
