"""Access control: the peers that every integration admits, and tickets.

Reads keys and secrets at start and again when files change, and warns at start if access is open.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.core.errors import SecretError
from kvferry.core.peer_settings import open_access_risks as open_peer_risks
from kvferry.core.security import NEARBY, Access, SecurityFiles, TicketSecrets, read_secret
from kvferry.core.side_channel.sockets import is_loopback_host
from kvferry.integrations.vllm.config import Config, ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    """The peers and tickets that an engine accepts, replaced in place, and its own keys."""

    access: Access = NEARBY
    secrets: TicketSecrets | None = None  # ``None`` if tickets are not signed
    exposed: tuple[str, ...] = ()  # a warning for each secret that other users can read


def read_security_settings(config: Config) -> SecuritySettings:
    """Read the keys and secrets that the configuration names.

    Raises ``ConfigError`` with each setting that is wrong, but without secrets.
    """
    settings, problems = examine_security_settings(config)
    if problems:
        raise ConfigError("; ".join(problems))
    return settings


def examine_security_settings(config: Config) -> tuple[SecuritySettings, list[str]]:
    """Return the usable settings, and a text for each setting that is wrong, without secrets."""
    access, exposed, problems = config.peer_settings.examine()
    secrets = None
    try:
        secrets, exposed_tickets = _ticket_secrets(config)
        exposed = [*exposed_tickets, *exposed]
    except SecretError as exc:
        problems.append(f"ticket_secrets: {exc}")
    settings = SecuritySettings(access=access, secrets=secrets, exposed=tuple(exposed))
    return settings, [f"kv_connector_extra_config: {each}" for each in problems]


def _ticket_secrets(config: Config) -> tuple[TicketSecrets | None, list[str]]:
    """Return the secrets, and a warning for each place of them that other users can read."""
    read = [read_secret(place) for place in config.ticket_secrets]
    secrets = TicketSecrets.of([each.text for each in read]) if read else None
    return secrets, [each.exposed for each in read if each.exposed]


def open_access_risks(security: SecuritySettings, host: str) -> Iterator[str]:
    """Yield a warning for each setting that leaves access to this engine open, and what to set."""
    yield from security.exposed
    yield from open_peer_risks(security.access, host)
    if security.secrets is None and not is_loopback_host(host):
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


def warn_of_open_access(security: SecuritySettings, host: str) -> None:
    """Log ``open_access_risks``."""
    for risk in open_access_risks(security, host):
        logger.warning("%s", risk)


def security_files(config: Config, security: SecuritySettings, *, who: str) -> SecurityFiles:
    """Return what reads files of keys and secrets again, and replaces them in ``security``."""

    def read() -> TicketSecrets | None:
        secrets, exposed = _ticket_secrets(config)
        # Files that were open from the beginning were logged then, and still count.
        if newly_exposed := set(exposed).difference(security.exposed):
            raise SecretError("; ".join(sorted(newly_exposed)))
        return secrets

    tickets = config.ticket_secrets, read, security.secrets
    return SecurityFiles(config.curve_peers, security.access, who=who, ticket_secrets=tickets)
