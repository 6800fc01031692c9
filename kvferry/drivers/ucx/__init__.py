"""The driver ucx: transfers by UCX's one-sided calls, without NIXL."""

from kvferry.drivers.ucx.transport import UcxTransport

__all__ = ["UcxTransport"]
