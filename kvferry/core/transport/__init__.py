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

__all__ = [
    "INTERFACE_VERSION",
    "Capabilities",
    "Notification",
    "PeerId",
    "Quiescence",
    "State",
    "Status",
    "TransferId",
    "Transport",
]
