"""Moves the KV cache between LLM serving engines: any layout to any layout, over any transport.

The names that an integration needs are exported here. Each is imported when it is first used, so
that importing this package does no work. The rest is in ``kvferry.core``; drivers register under
the entry-point group ``kvferry.drivers``. ``examples/two_ranks.py`` is the place to start.
"""

TYPE_CHECKING = False  # type checkers take this name for true, so typing need not be imported
if TYPE_CHECKING:
    from kvferry.core.directory import Directory, LocalDirectory
    from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity, Load, Results
    from kvferry.core.errors import KVFerryError
    from kvferry.core.layout import Field, Group, GroupKind, Layout, axis
    from kvferry.core.layout.paged_layout import paged_layout
    from kvferry.core.lifecycle.holds import random_incarnation
    from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
    from kvferry.core.lifecycle.ticket import Ticket
    from kvferry.core.local_engine import LocalEngine
    from kvferry.core.memory import region_of
    from kvferry.core.messages import Coordinates
    from kvferry.core.peer_settings import PeerSettings
    from kvferry.core.planner.build_copies import Pages
    from kvferry.core.region_exchange import (
        ExchangeOptions,
        RegionExchange,
        RegionRead,
        RemoteRegion,
    )
    from kvferry.core.side_channel.server import HandshakeServer
    from kvferry.core.transport.registry import create as create_transport

    __version__: str

__all__ = [
    "Coordinates",
    "Directory",
    "Endpoint",
    "EndpointOptions",
    "ExchangeOptions",
    "Field",
    "Group",
    "GroupKind",
    "HandshakeServer",
    "Identity",
    "KVFerryError",
    "Layout",
    "Load",
    "LocalDirectory",
    "LocalEngine",
    "Pages",
    "PeerSettings",
    "RegionExchange",
    "RegionRead",
    "RemoteRegion",
    "Results",
    "SchedulerHolds",
    "Ticket",
    "__version__",
    "axis",
    "create_transport",
    "paged_layout",
    "random_incarnation",
    "region_of",
]

_SOURCES = {
    "Coordinates": "core.messages:Coordinates",
    "Directory": "core.directory:Directory",
    "LocalDirectory": "core.directory:LocalDirectory",
    "Endpoint": "core.endpoint:Endpoint",
    "EndpointOptions": "core.endpoint:EndpointOptions",
    "Field": "core.layout:Field",
    "Group": "core.layout:Group",
    "GroupKind": "core.layout:GroupKind",
    "HandshakeServer": "core.side_channel.server:HandshakeServer",
    "SchedulerHolds": "core.lifecycle.scheduler_holds:SchedulerHolds",
    "Identity": "core.endpoint:Identity",
    "KVFerryError": "core.errors:KVFerryError",
    "Layout": "core.layout:Layout",
    "Load": "core.endpoint:Load",
    "Pages": "core.planner.build_copies:Pages",
    "ExchangeOptions": "core.region_exchange:ExchangeOptions",
    "RegionExchange": "core.region_exchange:RegionExchange",
    "RegionRead": "core.region_exchange:RegionRead",
    "RemoteRegion": "core.region_exchange:RemoteRegion",
    "PeerSettings": "core.peer_settings:PeerSettings",
    "Results": "core.endpoint:Results",
    "LocalEngine": "core.local_engine:LocalEngine",
    "Ticket": "core.lifecycle.ticket:Ticket",
    "axis": "core.layout:axis",
    "create_transport": "core.transport.registry:create",
    "paged_layout": "core.layout.paged_layout:paged_layout",
    "random_incarnation": "core.lifecycle.holds:random_incarnation",
    "region_of": "core.memory:region_of",
}
"""Exported name to "module:attribute", where the module is relative to this package. The imports
above say the same to type checkers."""

# Hidden from type checkers: with a module __getattr__, they would accept any attribute.
if not TYPE_CHECKING:

    def __getattr__(name):  # noqa: ANN001, ANN202
        """Import an exported name when it is first used (PEP 562)."""
        if name == "__version__":
            from importlib.metadata import version

            return version(__name__)
        if name not in _SOURCES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module, _, attribute = _SOURCES[name].partition(":")
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), attribute)
        return value

    def __dir__():  # noqa: ANN202
        """List the exported names, also those that are not imported yet."""
        return sorted({*globals(), *__all__})
