"""Access control: read the configured keys and secrets, at start and again when files change.

Also warns at start if access is open.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvferry.core.errors import HandshakeError, SecretError
from kvferry.core.security import (
    FILE,
    LOOK_SECONDS,
    NEARBY,
    Access,
    KeyPair,
    Networks,
    PeerKeys,
    Reading,
    Secret,
    SourceWatcher,
    TicketSecrets,
    WatchedSetting,
    is_source,
    listed_keys,
    read_secret,
)
from kvferry.core.side_channel.sockets import is_loopback_host, numeric_hosts
from kvferry.integrations.vllm.config import Config, ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LOGGED_KEYS = 4
"""How many added or removed keys one log line names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySettings:
    """The peers and tickets that an engine accepts, and its own keys and secrets.

    Attributes:
        access: This engine's keys, which peers its side channel admits, and to which peers this
            engine connects.
        secrets: The secrets that sign and check tickets; ``None`` if tickets are not signed.
        exposed: A warning for each secret that other users of this host can read.

    ``watch_security_files`` replaces the peers and the secrets in place.
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
            ``curve_secret_key`` and ``curve_peers`` is set. The message names every problem, and
            never shows a secret.
    """
    settings, problems = examine_security_settings(config, environment)
    if problems:
        raise ConfigError("; ".join(problems))
    return settings


def examine_security_settings(
    config: Config, environment: Mapping[str, str] = os.environ
) -> tuple[SecuritySettings, list[str]]:
    """Read the keys and secrets that the configuration names, and return every problem.

    Args:
        config: The settings, which name files and environment variables.
        environment: The environment variables.

    Returns:
        The settings, without those that cannot be used, and a text for each problem. No text shows
        a secret.
    """
    problems: list[str] = []
    tickets = _read_all("ticket_secrets", config.ticket_secrets, environment, problems)
    own_key = [config.curve_secret_key] if config.curve_secret_key else []
    own = _read_all("curve_secret_key", own_key, environment, problems)
    settings = SecuritySettings(
        access=_examine_access(config, own, environment, problems) or NEARBY,
        secrets=_examine_tickets(config, tickets, problems),
        exposed=_exposed([*tickets, *own]),
    )
    return settings, problems


def _read_all(
    setting: str, places: Iterable[str], environment: Mapping[str, str], problems: list[str]
) -> list[Secret]:
    """Return the secrets of a setting that can be read, and add a problem for each other one."""
    found = [
        _usable(f"{setting}: ", partial(read_secret, place, environment), problems)
        for place in places
    ]
    return [secret for secret in found if secret is not None]


def _examine_tickets(
    config: Config, found: Sequence[Secret], problems: list[str]
) -> TicketSecrets | None:
    """Return the secrets of tickets; ``None`` if there are none or one cannot be used."""
    if not found or len(found) < len(config.ticket_secrets):
        return None
    texts = [each.text for each in found]
    return _usable("ticket_secrets: ", partial(TicketSecrets.of, texts), problems)


def _examine_access(
    config: Config, own: Sequence[Secret], environment: Mapping[str, str], problems: list[str]
) -> Access | None:
    """Return which peers are admitted; ``None`` if a setting cannot be used."""
    before = len(problems)
    networks = _usable("", partial(_networks, config), problems)
    pairs = [
        _usable("curve_secret_key: ", partial(KeyPair.of, each.text, each.source), problems)
        for each in own
    ]
    listed = [
        _usable("curve_peers: ", partial(listed_keys, group, "curve_peers", environment), problems)
        for group in _peer_groups(config)
    ]
    if len(problems) > before or (config.curve_secret_key and not own):
        return None
    peers = PeerKeys(frozenset[bytes]().union(*(keys for keys in listed if keys)))
    pair = pairs[0] if pairs else None
    return _usable("", lambda: Access(own=pair, peers=peers, networks=networks), problems)


def _peer_groups(config: Config) -> list[list[str]]:
    """Return the keys in ``curve_peers`` as one list, and each place of more keys as another."""
    places = [[text] for text in config.curve_peers if is_source(text)]
    return [[text for text in config.curve_peers if not is_source(text)], *places]


def _usable(setting: str, read: Callable[[], T], problems: list[str]) -> T | None:
    """Return what reading a setting gives; add the problem and return ``None`` if it is refused.

    Args:
        setting: The setting's name with a colon; empty if the error has the name.
        read: Reads the setting, and may raise ``SecretError``.
        problems: The problems so far.
    """
    try:
        return read()
    except SecretError as exc:
        problems.append(f"kv_connector_extra_config: {setting}{exc}")
        return None


def watch_security_files(
    config: Config,
    security: SecuritySettings,
    *,
    who: str,
    is_worker: bool = False,
    environment: Mapping[str, str] = os.environ,
    seconds: float = LOOK_SECONDS,
) -> SourceWatcher:
    """Read files of keys and secrets again while the engine runs, and use what they contain.

    The peers' keys and the ticket secrets are replaced in ``security``. A change of the engine's
    own key is only logged: it takes effect with a restart.

    Args:
        config: The settings, which name the files.
        security: What was read from the files when this half of the engine started.
        who: The part of the engine that reads, for log lines.
        is_worker: Read only what a worker uses: the peers' keys.
        environment: The environment variables.
        seconds: Time between two readings.

    Returns:
        The thread that reads; the caller closes it.
    """
    watched: list[WatchedSetting[Any]] = []
    own, peers, secrets = security.access.own, security.access.peers, security.secrets
    if isinstance(peers, PeerKeys) and _has_files(config.curve_peers):
        watched.append(_watched_peers(config, own, peers, environment))
    if secrets is not None and _has_files(config.ticket_secrets) and not is_worker:
        used = Reading(secrets.secrets, frozenset(security.exposed))
        watched.append(_watched_secrets(config, secrets, used, environment))
    if own is not None and _has_files([config.curve_secret_key]) and not is_worker:
        watched.append(_watched_own_key(config, own, environment))
    return SourceWatcher(watched, who=who, seconds=seconds)


def _watched_peers(
    config: Config, own: KeyPair | None, peers: PeerKeys, environment: Mapping[str, str]
) -> WatchedSetting[AbstractSet[bytes]]:
    """Return how to read ``curve_peers`` again, and to replace the keys in ``peers``."""

    def read() -> Reading[AbstractSet[bytes]]:
        keys = listed_keys(config.curve_peers, "curve_peers", environment)
        return Reading(Access(own=own, peers=keys).peers)

    def use(keys: AbstractSet[bytes]) -> str:
        before = frozenset(peers)
        peers.replace(keys)
        changes = [("added", keys - before), ("removed", before - keys)]
        named = [f", {what} {_listed(those)}" for what, those in changes if those]
        return f"{_count(keys, 'key')}{''.join(named)}"

    return WatchedSetting("curve_peers", Reading(frozenset(peers)), read=read, use=use)


def _watched_secrets(
    config: Config,
    secrets: TicketSecrets,
    used: Reading[tuple[bytes, ...]],
    environment: Mapping[str, str],
) -> WatchedSetting[tuple[bytes, ...]]:
    """Return how to read ``ticket_secrets`` again, and to replace those in ``secrets``."""

    def read() -> Reading[tuple[bytes, ...]]:
        found = [read_secret(source, environment) for source in config.ticket_secrets]
        texts = TicketSecrets.of([each.text for each in found]).secrets
        return Reading(texts, frozenset(_exposed(found)))

    def use(newer: tuple[bytes, ...]) -> str:
        same = newer[0] == secrets.secrets[0]
        secrets.replace(TicketSecrets(newer))
        signs = "the same one as before" if same else "another one than before"
        return f"{_count(newer, 'secret')}, and tickets are signed with {signs}"

    return WatchedSetting("ticket_secrets", used, read=read, use=use)


def _watched_own_key(
    config: Config, own: KeyPair, environment: Mapping[str, str]
) -> WatchedSetting[KeyPair]:
    """Return how to notice that the file of this engine's own key has another key."""

    def read() -> Reading[KeyPair]:
        found = read_secret(config.curve_secret_key, environment)
        if KeyPair.of(found.text, found.source) != own:
            raise SecretError(
                f"{found.source} has another key, which takes effect when this engine is "
                f"restarted; until then its public key is {own.public.hex()}"
            )
        return Reading(own)

    return WatchedSetting("curve_secret_key", Reading(own), read=read, use=lambda key: "")


def _exposed(secrets: Sequence[Secret]) -> tuple[str, ...]:
    """Return a warning for each secret that other users of this host can read."""
    return tuple(secret.exposed for secret in secrets if secret.exposed)


def _has_files(sources: Sequence[str]) -> bool:
    """Return whether one of the places of keys or secrets is a file."""
    return any(source.startswith(FILE) for source in sources)


def _count(values: Collection[object], word: str) -> str:
    """Return as text how many values there are, such as ``2 keys``."""
    return f"{len(values)} {word}{'' if len(values) == 1 else 's'}"


def _listed(keys: AbstractSet[bytes]) -> str:
    """Return public keys as text for a log line; of many, the first."""
    named = ", ".join(sorted(key.hex() for key in keys)[:MAX_LOGGED_KEYS])
    more = len(keys) - MAX_LOGGED_KEYS
    return f"{named} and {more} more" if more > 0 else named


def open_access_risks(security: SecuritySettings, host: str) -> Iterator[str]:
    """Yield a warning for each setting that leaves access to this engine open.

    Args:
        security: This engine's settings.
        host: Host on which the side channel listens. If it is a loopback address, the only
            warnings are those of secrets that other users can read.
    """
    yield from security.exposed
    if not is_loopback_host(host):
        yield from _warnings(security, host)


def warn_of_open_access(security: SecuritySettings, host: str) -> None:
    """Log ``open_access_risks``, if there are any; the arguments are the same."""
    for risk in open_access_risks(security, host):
        logger.warning("%s", risk)


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
