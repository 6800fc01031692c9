"""The endpoint: serves one rank's pages to other engines, and loads pages from them."""

from kvferry.core.endpoint.endpoint import Endpoint
from kvferry.core.endpoint.handshake_relay import HandshakeRelay
from kvferry.core.endpoint.load import Load
from kvferry.core.endpoint.options import EndpointOptions, Identity, Results
from kvferry.core.endpoint.page_copies import PageCopies
from kvferry.core.endpoint.relayed_replies import RelayedHandshakes
from kvferry.core.endpoint.room_follower import RoomFollower
from kvferry.core.metrics import LoadRecord

__all__ = [
    "Endpoint",
    "EndpointOptions",
    "HandshakeRelay",
    "Identity",
    "Load",
    "LoadRecord",
    "PageCopies",
    "RelayedHandshakes",
    "Results",
    "RoomFollower",
]
