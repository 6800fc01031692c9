"""Who may, as the configuration has it: keys and secrets read, and what is open said at start."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvferry.core.errors import HandshakeError, SecretError
from kvferry.core.handshake.sockets import is_loopback, numeric_hosts
from kvferry.core.security import (
    NEARBY,
    Access,
    KeyPair,
    Networks,
    Secret,
    TicketSecrets,
    listed_keys,
    read_secret,
)
from kvferry.integrations.vllm.config import Config, ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    """Who may what.

    Attributes:
        access: who is admitted to the side channel, and to whom this engine connects.
        secrets: sign and check tickets; ``None`` where they are not signed.
        exposed: which secrets others may know, and what to do.
    """

    access: Access = NEARBY
    secrets: TicketSecrets | None = None
    exposed: tuple[str, ...] = ()


def admission_of(config: Config, environment: Mapping[str, str] = os.environ) -> SecuritySettings:
    """Read the keys and secrets that the configuration names.

    Raises:
        ConfigError: one cannot be read or is none, or what belongs together is not there; never
            shows a secret.
    """
    read: list[Secret] = []

    def secret_of(place: str) -> Secret:
        read.append(read_secret(place, environment))
        return read[-1]

    try:
        tickets = [secret_of(place).text for place in config.ticket_secrets]
        own = secret_of(config.curve_secret_key) if config.curve_secret_key else None
        access = Access(
            own=KeyPair.of(own.text, own.place) if own else None,
            peers=listed_keys(config.curve_peers, "curve_peers", environment),
            networks=_networks(config),
        )
        secrets = TicketSecrets.of(tickets) if tickets else None
    except SecretError as exc:
        raise ConfigError(f"kv_connector_extra_config: {exc}") from exc
    exposed = tuple(secret.exposed for secret in read if secret.exposed)
    return SecuritySettings(access=access, secrets=secrets, exposed=exposed)


def warn(admission: SecuritySettings, host: str) -> None:
    """Say at start what is open.

    Args:
        admission: of this engine.
        host: where its side channel listens. What listens on the loopback address only is taken
            to be among friends.
    """
    for text in admission.exposed:
        logger.warning("%s", text)
    if _is_private(host):
        return
    for text in _open(admission, host):
        logger.warning("%s", text)


def _networks(config: Config) -> Networks | None:
    """Return where peers may be; ``None`` for anywhere."""
    if isinstance(config.allowed_peers, str):
        return None
    if config.allowed_peers is None:
        return Networks.nearby()
    return Networks.of(config.allowed_peers)


def _is_private(host: str) -> bool:
    try:
        return all(map(is_loopback, numeric_hosts(host, 0)))
    except HandshakeError:
        return False


def _open(admission: SecuritySettings, host: str) -> Iterator[str]:
    if admission.access.own is None:
        yield (
            f"the side channel at {host} is open: whoever reaches it learns where this engine's "
            "KV cache is and how to read it, and nothing there is encrypted. Set curve_secret_key "
            "and curve_peers ('kvferry keygen' makes keys), or let only your engines reach it"
        )
    if admission.secrets is None:
        yield (
            "tickets are not signed: those that were altered are refused, but a client that may "
            "send kv_transfer_params can name an engine of its own, whose pages are decoded. Set "
            "ticket_secrets, or let only your router send them"
        )
        if admission.access.networks is None:
            yield (
                "a ticket may name any address, and this engine connects to it: allowed_peers is "
                "'anywhere'. List networks there, or set ticket_secrets"
            )
    if _is_far(admission.access, host):
        yield (
            f"the side channel at {host} has a public address, and engines of other hosts with "
            "such addresses are neither served nor asked. Set allowed_peers to their networks"
        )


def _is_far(access: Access, host: str) -> bool:
    """Return whether engines like this one are not admitted, and nobody has said so."""
    networks = access.networks
    if networks is None or not networks.this_host:
        return False
    others = Networks(networks.networks)
    try:
        return not any(numeric in others for numeric in numeric_hosts(host, 0))
    except HandshakeError:
        return False
