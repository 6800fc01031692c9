"""A kvferry driver made of Mooncake's Transfer Engine, over tcp."""

from kvferry_mooncake.transport import MooncakeTransport

__all__ = ["MooncakeTransport"]
