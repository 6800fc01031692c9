"""Access control: read the configured keys and secrets, at start and again when files change.

Also warns at start if access is open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
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
    """The peers and tickets that an engine accepts, replaced in place, and its own keys."""

    access: Access = NEARBY
    secrets: TicketSecrets | None = None  # ``None`` if tickets are not signed
    exposed: tuple[str, ...] = ()  # a warning for each secret that other users can read


def read_security_settings(config: Config) -> SecuritySettings:
    """Read the keys and secrets that the configuration names.

    Raises:
        ConfigError: A key or secret cannot be read or is malformed, or only one of
            ``curve_secret_key`` and ``curve_peers`` is set. The message names every problem, and
            never shows a secret.
    """
    settings, problems = examine_security_settings(config)
    if problems:
        raise ConfigError("; ".join(problems))
    return settings


def examine_security_settings(config: Config) -> tuple[SecuritySettings, list[str]]:
    """Return the usable settings, and a text for each problem, which shows no secret."""
    problems: list[str] = []

    @contextmanager
    def noting(setting: str) -> Iterator[None]:
        try:
            yield
        except SecretError as exc:
            problems.append(f"kv_connector_extra_config: {setting}{exc}")

    own: list[Secret] = []
    pair: KeyPair | None = None
    if config.curve_secret_key:
        with noting("curve_secret_key: "):
            own.append(read_secret(config.curve_secret_key))
            pair = KeyPair.of(own[0].text, own[0].source)
    # The keys in ``curve_peers`` itself are one list, and each place of more keys is another.
    groups = [[text for text in config.curve_peers if not is_source(text)]]
    groups += [[text] for text in config.curve_peers if is_source(text)]
    peers = frozenset[bytes]()
    for group in groups:
        with noting("curve_peers: "):
            peers |= listed_keys(group, "curve_peers")
    access, secrets = NEARBY, None
    with noting(""):
        networks = _networks(config)
        if not problems:
            access = Access(own=pair, peers=PeerKeys(peers), networks=networks)
    tickets: list[Secret] = []
    for place in config.ticket_secrets:
        with noting("ticket_secrets: "):
            tickets.append(read_secret(place))
    if tickets and len(tickets) == len(config.ticket_secrets):
        with noting("ticket_secrets: "):
            secrets = TicketSecrets.of([each.text for each in tickets])
    settings = SecuritySettings(access=access, secrets=secrets, exposed=_exposed([*tickets, *own]))
    return settings, problems


def watch_security_files(
    config: Config,
    security: SecuritySettings,
    *,
    who: str,
    is_worker: bool = False,
    seconds: float = LOOK_SECONDS,
) -> SourceWatcher:
    """Read files of keys and secrets again while the engine runs, and use what they contain.

    The peers' keys and the ticket secrets are replaced in ``security``. A change of the engine's
    own key is only logged: it takes effect with a restart. A worker uses the peers' keys only.
    ``who`` is the part of the engine that reads, for log lines; ``seconds`` pass between two
    readings. The caller closes the thread that is returned.
    """
    own, peers, secrets = security.access.own, security.access.peers, security.secrets
    watched: list[WatchedSetting[Any]] = []

    def watch(
        name: str,
        places: Iterable[str],
        used: Reading[T],
        read: Callable[[], Reading[T]],
        use: Callable[[T], str],
    ) -> None:
        if any(place.startswith(FILE) for place in places):
            watched.append(WatchedSetting(name, used, read=read, use=use))

    if isinstance(peers, PeerKeys):

        def read_peers() -> Reading[AbstractSet[bytes]]:
            keys = listed_keys(config.curve_peers, "curve_peers")
            return Reading(Access(own=own, peers=keys).peers)

        before: Reading[AbstractSet[bytes]] = Reading(frozenset(peers))
        watch("curve_peers", config.curve_peers, before, read_peers, partial(_use_peers, peers))
    if secrets is not None and not is_worker:
        places = config.ticket_secrets
        used = Reading(secrets.secrets, frozenset(security.exposed))
        read_again = partial(_read_ticket_secrets, places)
        watch("ticket_secrets", places, used, read_again, partial(_use_secrets, secrets))
    if own is not None and not is_worker:
        place = config.curve_secret_key
        same = partial(_refuse_another_key, place, own)
        watch("curve_secret_key", [place], Reading(own), same, lambda key: "")
    return SourceWatcher(watched, who=who, seconds=seconds)


def _use_peers(peers: PeerKeys, keys: AbstractSet[bytes]) -> str:
    """Replace the keys in use; return what to log."""
    before = frozenset(peers)
    peers.replace(keys)
    changes = [("added", keys - before), ("removed", before - keys)]
    named = [f", {what} {_listed(those)}" for what, those in changes if those]
    return f"{_count(keys, 'key')}{''.join(named)}"


def _read_ticket_secrets(places: Iterable[str]) -> Reading[tuple[bytes, ...]]:
    found = [read_secret(place) for place in places]
    texts = TicketSecrets.of([each.text for each in found]).secrets
    return Reading(texts, frozenset(_exposed(found)))


def _use_secrets(secrets: TicketSecrets, newer: tuple[bytes, ...]) -> str:
    """Replace the secrets in use; return what to log."""
    same = newer[0] == secrets.secrets[0]
    secrets.replace(TicketSecrets(newer))
    signs = "the same one as before" if same else "another one than before"
    return f"{_count(newer, 'secret')}, and tickets are signed with {signs}"


def _refuse_another_key(place: str, own: KeyPair) -> Reading[KeyPair]:
    """Raise ``SecretError`` if the file of this engine's own key has another key."""
    found = read_secret(place)
    if KeyPair.of(found.text, found.source) != own:
        raise SecretError(
            f"{found.source} has another key, which takes effect when this engine is "
            f"restarted; until then its public key is {own.public.hex()}"
        )
    return Reading(own)


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

    On a loopback address, only for secrets that other users can read.
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
