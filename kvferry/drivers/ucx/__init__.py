"""UCX: one-sided transfers of whichever libucp is there, without NIXL."""

from kvferry.drivers.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
