"""Access control: read the configured keys and secrets, at start and again when files change.

Also warns at start if access is open.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

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

    ``watch_security_files`` replaces the peers and the secrets in place.
    """

    access: Access = NEARBY
    secrets: TicketSecrets | None = None  # ``None`` if tickets are not signed
    exposed: tuple[str, ...] = ()  # a warning for each secret that other users can read


def read_security_settings(
    config: Config, environment: Mapping[str, str] = os.environ
) -> SecuritySettings:
    """Read the keys and secrets that the configuration names.

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
    """Return the settings, without those that cannot be used, and a text for each problem.

    No text shows a secret.
    """
    problems: list[str] = []

    def usable(setting: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except SecretError as exc:
            problems.append(f"kv_connector_extra_config: {setting}{exc}")
            return None

    def secrets(setting: str, places: Iterable[str]) -> list[Secret]:
        reads = [partial(read_secret, place, environment) for place in places]
        found = [usable(f"{setting}: ", read) for read in reads]
        return [secret for secret in found if secret is not None]

    own = secrets("curve_secret_key", filter(None, [config.curve_secret_key]))
    pairs = [usable("curve_secret_key: ", partial(KeyPair.of, s.text, s.source)) for s in own]
    # The keys in ``curve_peers`` itself are one list, and each place of more keys is another.
    groups = [[text for text in config.curve_peers if not is_source(text)]]
    groups += [[text] for text in config.curve_peers if is_source(text)]
    listed = [
        usable("curve_peers: ", partial(listed_keys, group, "curve_peers", environment))
        for group in groups
    ]
    networks = usable("", partial(_networks, config))
    access = None
    if not problems:
        peers = PeerKeys(frozenset[bytes]().union(*filter(None, listed)))
        own_pair = pairs[0] if pairs else None
        access = usable("", lambda: Access(own=own_pair, peers=peers, networks=networks))
    tickets = secrets("ticket_secrets", config.ticket_secrets)
    signing = None
    if tickets and len(tickets) == len(config.ticket_secrets):
        texts = [each.text for each in tickets]
        signing = usable("ticket_secrets: ", lambda: TicketSecrets.of(texts))
    settings = SecuritySettings(
        access=access or NEARBY, secrets=signing, exposed=_exposed([*tickets, *own])
    )
    return settings, problems


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
    own key is only logged: it takes effect with a restart. A worker uses the peers' keys only.
    ``who`` is the part of the engine that reads, for log lines; ``seconds`` pass between two
    readings. The caller closes the thread that is returned.
    """
    own, peers, secrets = security.access.own, security.access.peers, security.secrets
    rows = (
        (config.curve_peers, isinstance(peers, PeerKeys), _watched_peers),
        (config.ticket_secrets, secrets is not None and not is_worker, _watched_secrets),
        ([config.curve_secret_key], own is not None and not is_worker, _watched_own_key),
    )
    watched = [
        setting(config, security, environment)
        for places, is_used, setting in rows
        if is_used and any(place.startswith(FILE) for place in places)
    ]
    return SourceWatcher(watched, who=who, seconds=seconds)


def _watched_peers(
    config: Config, security: SecuritySettings, environment: Mapping[str, str]
) -> WatchedSetting[Any]:
    """Return how to read ``curve_peers`` again, and to replace the keys in use."""
    own, peers = security.access.own, cast("PeerKeys", security.access.peers)

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
    config: Config, security: SecuritySettings, environment: Mapping[str, str]
) -> WatchedSetting[Any]:
    """Return how to read ``ticket_secrets`` again, and to replace those in use."""
    secrets = cast("TicketSecrets", security.secrets)

    def read() -> Reading[tuple[bytes, ...]]:
        found = [read_secret(source, environment) for source in config.ticket_secrets]
        texts = TicketSecrets.of([each.text for each in found]).secrets
        return Reading(texts, frozenset(_exposed(found)))

    def use(newer: tuple[bytes, ...]) -> str:
        same = newer[0] == secrets.secrets[0]
        secrets.replace(TicketSecrets(newer))
        signs = "the same one as before" if same else "another one than before"
        return f"{_count(newer, 'secret')}, and tickets are signed with {signs}"

    used = Reading(secrets.secrets, frozenset(security.exposed))
    return WatchedSetting("ticket_secrets", used, read=read, use=use)


def _watched_own_key(
    config: Config, security: SecuritySettings, environment: Mapping[str, str]
) -> WatchedSetting[Any]:
    """Return how to notice that the file of this engine's own key has another key."""
    own = cast("KeyPair", security.access.own)

    def read() -> Reading[KeyPair]:
        found = read_secret(config.curve_secret_key, environment)
        if KeyPair.of(found.text, found.source) != own:
            raise SecretError(
                f"{found.source} has another key, which takes effect when this engine is "
                f"restarted; until then its public key is {own.public.hex()}"
            )
        return Reading(own)

    return WatchedSetting("curve_secret_key", Reading(own), read=read, use=lambda key: "")


def _exposed(secrets: Iterable[Secret]) -> tuple[str, ...]:
    return tuple(secret.exposed for secret in secrets if secret.exposed)


def _count(values: Collection[object], word: str) -> str:
    return f"{len(values)} {word}{'' if len(values) == 1 else 's'}"


def _listed(keys: AbstractSet[bytes]) -> str:
    """Return public keys as text for a log line; of many, the first."""
    named = ", ".join(sorted(key.hex() for key in keys)[:MAX_LOGGED_KEYS])
    more = len(keys) - MAX_LOGGED_KEYS
    return f"{named} and {more} more" if more > 0 else named


def open_access_risks(security: SecuritySettings, host: str) -> Iterator[str]:
    """Yield a warning for each setting that leaves access to this engine open, and what to set.

    If the side channel listens at a loopback address, the only warnings are those of secrets that
    other users can read.
    """
    yield from security.exposed
    if is_loopback_host(host):
        return
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
    """Return whether the default ``allowed_peers`` excludes the other hosts of a public network."""
    networks = access.networks
    if networks is None or not networks.this_host:  # ``allowed_peers`` is set
        return False
    listed = Networks(networks.networks)
    try:
        return not any(numeric in listed for numeric in numeric_hosts(host, 0))
    except HandshakeError:
        return False


def warn_of_open_access(security: SecuritySettings, host: str) -> None:
    """Log ``open_access_risks``."""
    for risk in open_access_risks(security, host):
        logger.warning("%s", risk)


def _networks(config: Config) -> Networks | None:
    """Return the networks in which peers are accepted, or ``None`` for any."""
    if isinstance(config.allowed_peers, str):
        return None
    if config.allowed_peers is None:
        return Networks.nearby()
    return Networks.of(config.allowed_peers)
