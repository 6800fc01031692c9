"""The engine's side channel, on which other engines fetch its layouts and check its health."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.lifecycle.rooms import Rooms
from kvferry.core.peer_settings import DEFAULT_DRIVER
from kvferry.core.side_channel.compatibility import engine_info
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.core.side_channel.sockets import is_loopback_host, own_address
from kvferry.integrations.vllm.config import Config

if TYPE_CHECKING:
    from kvferry.integrations.vllm.engine_facts import EngineFacts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSideChannel:
    """An engine and the address of its side channel, as tickets name them."""

    engine: str
    incarnation: int = 0
    host: str = ""
    port: int = 0  # before it is open: every reader refuses that
    key: bytes = b""  # its public key; empty if it is not encrypted


def loopback_risk(config: Config, *, chosen: bool) -> str | None:
    """Return a warning that only this host can load from an engine, if that may be an oversight."""
    host = config.side_channel_host
    if chosen or config.driver == DEFAULT_DRIVER or not is_loopback_host(host):
        return None
    address = own_address() or "an address at which they reach this one"
    return (
        f"the side channel listens at {host}: only engines on this host can load from this one. "
        f"For decode engines on other hosts, set side_channel_host to {address}; if all engines "
        f"run on this host, set it to {host}"
    )


def serve(
    ranks: tuple[bytes, ...],
    facts: EngineFacts,
    *,
    problems: Callable[[], Sequence[str]],
    revoke: Callable[[bool], int],
    rooms: Rooms,
    library: str = "",
) -> tuple[EngineSideChannel, HandshakeServer]:
    """Open the side channel and serve the encoded payloads of this engine's ranks, in rank order.

    ``problems`` and ``revoke`` are called from the server's thread. Returns the address for
    tickets, and the server, which the caller closes; ``HandshakeError`` names the setting to
    change.
    """
    info, config, access = engine_info(ranks), facts.config, facts.security.access
    server = HandshakeServer(
        ranks,
        engine=info.engine,
        incarnation=info.incarnation,
        host=config.side_channel_host,
        port=config.side_channel_port,
        access=access,
        problems=problems,
        revoke=revoke,
        ticket_key=facts.ticket_key.public,
        rooms=rooms,
    )
    layout = info.ranks[0].layout
    logger.info(
        "KVFerryConnector serves engine %s as %s: driver %s%s, side channel %s at %s port %d, "
        "tickets %s, memory %s, %d rank(s), layout %d fields in %s",
        info.engine,
        facts.role,
        info.ranks[0].driver,
        f" ({library})" if library else "",
        "encrypted" if access.own is not None else "not encrypted",
        server.host,
        server.port,
        "signed" if facts.security.secrets is not None else "not signed",
        "+".join(sorted({region.kind for region in layout.regions})),
        len(info.ranks),
        len(layout.fields),
        " and ".join(
            f"{group.kind} of {layout.pages(i)} blocks of {group.block_tokens} tokens"
            for i, group in enumerate(layout.groups)
        ),
    )
    serving = EngineSideChannel(
        engine=info.engine,
        incarnation=info.incarnation,
        host=server.host,
        port=server.port,
        key=access.public,
    )
    return serving, server
