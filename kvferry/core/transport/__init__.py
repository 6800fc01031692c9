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
from kvferry.core.transport.base import (
    BaseTransport,
    DriverConnection,
    DriverTransfer,
    PagedRequest,
    TransferRequest,
    parse_options,
)
from kvferry.core.transport.copies import Copies, Segment
from kvferry.core.transport.paged import PagedCopies, PlacedStrips, Strips, StripSide
from kvferry.core.transport.threads import EnterThread, enter_nothing, start_thread

__all__ = [
    "INTERFACE_VERSION",
    "BaseTransport",
    "Capabilities",
    "Copies",
    "DriverConnection",
    "DriverTransfer",
    "EnterThread",
    "Notification",
    "PagedCopies",
    "PagedRequest",
    "PeerId",
    "PlacedStrips",
    "Quiescence",
    "Segment",
    "State",
    "Status",
    "StripSide",
    "Strips",
    "TransferId",
    "TransferRequest",
    "Transport",
    "enter_nothing",
    "parse_options",
    "start_thread",
]
