"""Access control: read the configured keys and secrets, at start and again when files change.

Also warns at start if access is open.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeVar

from kvferry.core.errors import HandshakeError, SecretError
from kvferry.core.security import (
    FILE,
    NEARBY,
    Access,
    KeyPair,
    Networks,
    PeerKeys,
    Secret,
    TicketSecrets,
    listed_keys,
    read_secret,
)
from kvferry.core.side_channel.sockets import is_loopback_host, numeric_hosts
from kvferry.integrations.vllm.config import Config, ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 2.0
"""Time between two readings of the files; as two must agree, a change takes effect within twice
this."""


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
            ``curve_secret_key`` and ``curve_peers`` is set. The message names each setting that is
            wrong, and never shows a secret.
    """
    settings, problems = examine_security_settings(config)
    if problems:
        raise ConfigError("; ".join(problems))
    return settings


def examine_security_settings(config: Config) -> tuple[SecuritySettings, list[str]]:
    """Return the usable settings, and a text for each setting that is wrong, without secrets."""
    problems: list[str] = []

    def examined(setting: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except SecretError as exc:
            problems.append(f"kv_connector_extra_config: {setting}{exc}")
            return otherwise

    own = examined("curve_secret_key: ", lambda: _own_key(config), None)
    peers = examined("curve_peers: ", lambda: listed_keys(config.curve_peers, "curve_peers"), None)
    networks = examined("", lambda: _networks(config), None)
    access = NEARBY
    if not problems:
        pair = own[0] if own else None
        keys = PeerKeys(peers or ())
        access = examined("", lambda: Access(own=pair, peers=keys, networks=networks), NEARBY)
    tickets = examined("ticket_secrets: ", lambda: _ticket_secrets(config), None)
    read = [*(tickets[1] if tickets else ()), *(own[1:] if own else ())]
    secrets = tickets[0] if tickets else None
    return SecuritySettings(access=access, secrets=secrets, exposed=_exposed(read)), problems


def _own_key(config: Config) -> tuple[KeyPair, Secret] | None:
    if not config.curve_secret_key:
        return None
    secret = read_secret(config.curve_secret_key)
    return KeyPair.of(secret.text, secret.source), secret


def _ticket_secrets(config: Config) -> tuple[TicketSecrets, list[Secret]] | None:
    read = [read_secret(place) for place in config.ticket_secrets]
    return (TicketSecrets.of([each.text for each in read]), read) if read else None


def _networks(config: Config) -> Networks | None:
    """Return the networks in which peers are accepted, or ``None`` for any."""
    if isinstance(config.allowed_peers, str):
        return None
    if config.allowed_peers is None:
        return Networks.nearby()
    return Networks.of(config.allowed_peers)


def _exposed(secrets: Iterable[Secret]) -> tuple[str, ...]:
    return tuple(secret.exposed for secret in secrets if secret.exposed)


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


# Files that change while the engine runs.


class SecurityFiles:
    """Read files of keys and secrets again, every ``seconds``, and use what they contain.

    They are replaced in ``security``; a worker uses the peers' keys only. ``who`` is for the log.
    Files may be on a network file system, so a reading may hang: only a thread of its own waits for
    them. Without files, no thread is started.
    """

    def __init__(
        self,
        config: Config,
        security: SecuritySettings,
        *,
        who: str,
        is_worker: bool = False,
        seconds: float = LOOK_SECONDS,
    ) -> None:
        self._config = config
        self._security = security
        self._who = who
        self._seconds = seconds
        self._closed = threading.Event()
        # What reads each setting, raising ``SecretError`` for what cannot be used; and what uses it
        # and returns what to log, empty if that is in use already.
        settings: dict[str, tuple[Callable[[], object], Callable[[Any], str]]] = {}
        if any(place.startswith(FILE) for place in config.curve_peers):
            settings["curve_peers"] = self._read_peers, self._use_peers
        if not is_worker and any(place.startswith(FILE) for place in config.ticket_secrets):
            settings["ticket_secrets"] = self._read_secrets, self._use_secrets
        self._settings = settings
        # What was found last, and what was used or refused last. Used by the thread only.
        self._seen: dict[str, object] = {}
        self._decided: dict[str, object] = {}
        if settings:
            threading.Thread(target=self._run, name="kvferry-secrets", daemon=True).start()

    def close(self) -> None:
        """Stop, without waiting for a reading that has begun. May be called twice."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            for setting in self._settings:
                try:
                    self._look(setting)
                except Exception:
                    # The next change has to be noticed, whatever happened to this one.
                    logger.exception("%s: a key or secret could not be read again", self._who)

    def _look(self, setting: str) -> None:
        """Use or refuse what two readings in a row have found: one may be of half a file."""
        read, use = self._settings[setting]
        try:
            found = read()
        except SecretError as exc:
            found = str(exc)
        previous, self._seen[setting] = self._seen.get(setting), found
        if found != previous or found == self._decided.get(setting):
            return
        self._decided[setting] = found
        if isinstance(found, str):
            logger.warning("%s: %s stays as it was: %s", self._who, setting, found)
        elif change := use(found):
            logger.info("%s: %s was read again: %s", self._who, setting, change)

    def _read_peers(self) -> AbstractSet[bytes]:
        keys = listed_keys(self._config.curve_peers, "curve_peers")
        return Access(own=self._security.access.own, peers=keys).peers

    def _use_peers(self, keys: AbstractSet[bytes]) -> str:
        peers = self._security.access.peers
        if keys == peers or not isinstance(peers, PeerKeys):
            return ""
        peers.replace(keys)
        return f"{len(keys)} key(s)"

    def _read_secrets(self) -> TicketSecrets | None:
        secrets, read = _ticket_secrets(self._config) or (None, [])
        # Files that were open from the beginning were logged then, and still count.
        if newly_exposed := set(_exposed(read)).difference(self._security.exposed):
            raise SecretError("; ".join(sorted(newly_exposed)))
        return secrets

    def _use_secrets(self, newer: TicketSecrets) -> str:
        used = self._security.secrets
        if used is None or newer == used:
            return ""
        signer = "the same one as" if newer.secrets[0] == used.secrets[0] else "another one than"
        used.replace(newer)
        return f"{len(newer.secrets)} secret(s), and tickets are signed with {signer} before"
