"""The nixl driver: moves bytes with any backend of NIXL, through NIXL's Python API.

NIXL itself is imported when the first transport is made.
"""

from kvferry.drivers.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
