"""The interface between kvferry and its drivers, and what every driver shares."""

from kvferry.core.transport.api import (
    INTERFACE_VERSION,
    Capabilities,
    Notification,
    PeerId,
    Quiescence,
    State,
    Status,
    TransferId,
    Transport,
)
from kvferry.core.transport.base import BaseTransport
from kvferry.core.transport.options import parse_options

__all__ = [
    "INTERFACE_VERSION",
    "BaseTransport",
    "Capabilities",
    "Notification",
    "PeerId",
    "Quiescence",
    "State",
    "Status",
    "TransferId",
    "Transport",
    "parse_options",
]
