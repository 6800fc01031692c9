"""The nixl driver: any backend of NIXL, which is imported with the first transport."""

from kvferry.drivers.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
