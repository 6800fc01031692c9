"""An engine's side channel, and how it is known to others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.core.handshake import EngineInfo, HandshakeServer, engine_info
from kvferry.core.security import NEARBY, Access
from kvferry.integrations.vllm.config import Config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSideChannel:
    """What a ticket says about its engine, and what the engine's own workers must know of it.

    Attributes:
        engine: its id.
        incarnation: of this start of it.
        host, port: where its side channel listens; port 0 while there is none.
        key: the public key of the side channel; empty if that is not encrypted.
    """

    engine: str
    incarnation: int
    host: str
    port: int = 0
    key: bytes = b""


def serve(
    ranks: tuple[bytes, ...],
    config: Config,
    access: Access = NEARBY,
    problems: Callable[[], Sequence[str]] = tuple,
    *,
    ticket_key: bytes = b"",
) -> tuple[EngineSideChannel, HandshakeServer]:
    """Serve what this engine's ranks publish.

    Args:
        ranks: the encoded payloads of all of them, in rank order.
        config: says where.
        access: says to whom.
        problems: says what is wrong with the engine, from any thread.
        ticket_key: the public key that proves its tickets.

    Returns:
        What to tell others, and the server, which the caller closes.

    Raises:
        HandshakeError: the address cannot be bound; names the setting to change.
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
    )
    logger.info("KVFerryConnector serves engine %s: %s", info.engine, _summary(info, server))
    serving = EngineSideChannel(
        engine=info.engine,
        incarnation=info.incarnation,
        host=server.host,
        port=server.port,
        key=access.public,
    )
    return serving, server


def _summary(info: EngineInfo, server: HandshakeServer) -> str:
    first = info.ranks[0]
    layout = first.layout
    kinds = sorted({region.kind for region in layout.regions})
    groups = [
        f"{group.kind} of {layout.pages(i)} blocks of {group.block_tokens} tokens"
        for i, group in enumerate(layout.groups)
    ]
    return (
        f"driver {first.driver}, memory {'+'.join(kinds)}, {len(info.ranks)} rank(s), layout "
        f"{len(layout.fields)} fields in {' and '.join(groups)}, side channel at "
        f"{server.host} port {server.port}"
    )
