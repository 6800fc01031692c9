"""Access control: read the configured keys and secrets, and warn at start if access is open."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvferry.core.errors import HandshakeError, SecretError
from kvferry.core.handshake.sockets import is_loopback_host, numeric_hosts
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
    """The peers and tickets that an engine accepts, and its own keys and secrets.

    Attributes:
        access: This engine's keys, which peers its side channel admits, and to which peers this
            engine connects.
        secrets: The secrets that sign and check tickets; ``None`` if tickets are not signed.
        exposed: A warning for each secret that other users of this host can read.
    """

    access: Access = NEARBY
    secrets: TicketSecrets | None = None
    exposed: tuple[str, ...] = ()


def read_security_settings(
    config: Config, environment: Mapping[str, str] = os.environ
) -> SecuritySettings:
    """Read the keys and secrets that the configuration names.

    Args:
        config: The settings, which name files and environment variables.
        environment: The environment variables.

    Raises:
        ConfigError: A key or secret cannot be read or is malformed, or only one of
            ``curve_secret_key`` and ``curve_peers`` is set. The message never shows a secret.
    """
    secrets_read: list[Secret] = []

    def secret_of(source: str) -> Secret:
        secrets_read.append(read_secret(source, environment))
        return secrets_read[-1]

    try:
        tickets = [secret_of(source).text for source in config.ticket_secrets]
        own = secret_of(config.curve_secret_key) if config.curve_secret_key else None
        access = Access(
            own=KeyPair.of(own.text, own.place) if own else None,
            peers=listed_keys(config.curve_peers, "curve_peers", environment),
            networks=_networks(config),
        )
        secrets = TicketSecrets.of(tickets) if tickets else None
    except SecretError as exc:
        raise ConfigError(f"kv_connector_extra_config: {exc}") from exc
    exposed = tuple(secret.exposed for secret in secrets_read if secret.exposed)
    return SecuritySettings(access=access, secrets=secrets, exposed=exposed)


def warn_of_open_access(security: SecuritySettings, host: str) -> None:
    """Log a warning for each setting that leaves access to this engine open.

    Args:
        security: This engine's settings.
        host: Host on which the side channel listens. If it is a loopback address, the only
            warnings are those of secrets that other users can read.
    """
    for text in security.exposed:
        logger.warning("%s", text)
    if is_loopback_host(host):
        return
    for text in _warnings(security, host):
        logger.warning("%s", text)


def _networks(config: Config) -> Networks | None:
    """Return the networks in which peers are accepted, or ``None`` for any."""
    if isinstance(config.allowed_peers, str):
        return None
    if config.allowed_peers is None:
        return Networks.nearby()
    return Networks.of(config.allowed_peers)


def _warnings(security: SecuritySettings, host: str) -> Iterator[str]:
    """Yield a warning for each setting that leaves access open or excludes this host's network.

    Each warning says what to set instead.

    Args:
        security: This engine's settings.
        host: Host on which the side channel listens.
    """
    if security.access.own is None:
        yield (
            f"the side channel at {host} is open: whoever reaches it learns where this engine's "
            "KV cache is and how to read it, and nothing there is encrypted. Set curve_secret_key "
            "and curve_peers ('kvferry keygen' makes keys), or let only your engines reach it"
        )
    if security.secrets is None:
        yield (
            "tickets are not signed: those that were altered are refused, but a client that may "
            "send kv_transfer_params can name an engine of its own, whose pages are decoded. Set "
            "ticket_secrets, or let only your router send them"
        )
        if security.access.networks is None:
            yield (
                "a ticket may name any address, and this engine connects to it: allowed_peers is "
                "'anywhere'. List networks there, or set ticket_secrets"
            )
    if _excludes_its_own_network(security.access, host):
        yield (
            f"the side channel at {host} has a public address, and engines of other hosts with "
            "such addresses are neither served nor asked. Set allowed_peers to their networks"
        )


def _excludes_its_own_network(access: Access, host: str) -> bool:
    """Return whether the default ``allowed_peers`` excludes other hosts of this host's network.

    The default is this host and private networks, so it excludes them if the side channel's host
    has a public address. ``False`` if ``allowed_peers`` is set.

    Args:
        access: This engine's access settings.
        host: Host on which the side channel listens.
    """
    networks = access.networks
    if networks is None or not networks.this_host:
        return False
    listed = Networks(networks.networks)
    try:
        return not any(numeric in listed for numeric in numeric_hosts(host, 0))
    except HandshakeError:
        return False
