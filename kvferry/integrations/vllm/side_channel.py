"""The engine's side channel, on which other engines fetch its layouts and check its health."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.security import NEARBY, Access
from kvferry.core.side_channel import EngineInfo, HandshakeServer, engine_info
from kvferry.core.side_channel.sockets import is_loopback_host, own_address
from kvferry.integrations.vllm.config import DEFAULT_DRIVER, Config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSideChannel:
    """An engine and the address of its side channel, as tickets name them."""

    engine: str
    incarnation: int
    host: str
    port: int = 0  # before it is open
    key: bytes = b""  # its public key; empty if it is not encrypted


def loopback_risk(config: Config, *, chosen: bool) -> str | None:
    """Return a warning that other hosts cannot load from this engine, if that may be an oversight.

    That is if the host was not ``chosen``, but a driver that is not the default one, for one host.
    """
    host = config.side_channel_host
    if chosen or config.driver == DEFAULT_DRIVER or not is_loopback_host(host):
        return None
    return (
        f"{_only_this_host(host)}. For decode engines on other hosts, set side_channel_host to "
        f"{_reachable_host()}; if all engines run on this host, set it to {host}"
    )


def report_loopback(config: Config, *, chosen: bool) -> None:
    """Log that other hosts cannot load from this engine: as a warning if it is a risk."""
    if risk := loopback_risk(config, chosen=chosen):
        logger.warning("%s", risk)
    elif is_loopback_host(config.side_channel_host):
        logger.info("%s", _only_this_host(config.side_channel_host))


def _only_this_host(host: str) -> str:
    return f"the side channel listens at {host}: only engines on this host can load from this one"


def _reachable_host() -> str:
    """Return as text which address to set, so that other hosts reach the side channel."""
    address = own_address()
    if address is None:
        return "an address at which they reach this host (it has no route to other hosts now)"
    return f"{address}, the address of this host on its route to other hosts"


def serve(
    ranks: tuple[bytes, ...],
    config: Config,
    access: Access = NEARBY,
    problems: Callable[[], Sequence[str]] = tuple,
    *,
    ticket_key: bytes = b"",
    rooms: Rooms | None = None,
    role: str,
    library: str = "",
    signs: bool = False,
) -> tuple[EngineSideChannel, HandshakeServer]:
    """Open the side channel and serve the encoded payloads of this engine's ranks, in rank order.

    ``problems`` is called from the server's thread. ``ticket_key`` is the public key with which
    peers verify this engine's tickets; ``rooms`` are what decode engines may follow. The others are
    for the log line.

    Returns:
        The address for tickets, and the server, which the caller closes.

    Raises:
        HandshakeError: The address cannot be bound; names the setting to change.
    """
    info = engine_info(ranks)
    server = HandshakeServer(
        ranks,
        engine=info.engine,
        incarnation=info.incarnation,
        host=config.side_channel_host,
        port=config.side_channel_port,
        access=access,
        problems=problems,
        ticket_key=ticket_key,
        rooms=rooms,
    )
    logger.info(
        "KVFerryConnector serves engine %s as %s: driver %s%s, side channel %s at %s port %d, "
        "tickets %s, %s",
        info.engine,
        role,
        info.ranks[0].driver,
        f" ({library})" if library else "",
        "encrypted" if access.own is not None else "not encrypted",
        server.host,
        server.port,
        "signed" if signs else "not signed",
        _summary(info),
    )
    serving = EngineSideChannel(
        engine=info.engine,
        incarnation=info.incarnation,
        host=server.host,
        port=server.port,
        key=access.public,
    )
    return serving, server


def _summary(info: EngineInfo) -> str:
    """Return an engine's memory, ranks and layout as text, for the log."""
    layout = info.ranks[0].layout
    kinds = sorted({region.kind for region in layout.regions})
    groups = [
        f"{group.kind} of {layout.pages(i)} blocks of {group.block_tokens} tokens"
        for i, group in enumerate(layout.groups)
    ]
    return (
        f"memory {'+'.join(kinds)}, {len(info.ranks)} rank(s), layout {len(layout.fields)} fields "
        f"in {' and '.join(groups)}"
    )
