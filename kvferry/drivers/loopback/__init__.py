"""The reference driver: CPU memory of this process and of other processes of this host."""

from kvferry.drivers.loopback.transport import LoopbackTransport

__all__ = ["LoopbackTransport"]
