"""The settings that users of every integration have: the driver, and which peers are admitted."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from kvferry.core.errors import HandshakeError, SecretError
from kvferry.core.security import NEARBY, Access, KeyPair, Networks, PeerKeys, listed_keys
from kvferry.core.security.secret_sources import read_secret
from kvferry.core.side_channel.sockets import is_loopback_host, numeric_hosts

logger = logging.getLogger(__name__)

DEFAULT_DRIVER = "loopback"
"""The driver if none is set, for processes of one host."""
ANYWHERE = "anywhere"
"""The value of ``allowed_peers`` that accepts every address."""

Source = Annotated[str, Meta(min_length=1, max_length=4096)]
"""An entry of a setting that is a list: a network, a public key, or the place of a key or secret
(``file:PATH`` or ``env:NAME``).
"""
Sources = Annotated[tuple[Source, ...], Meta(max_length=4096)]
AllowedPeers = Sources | Annotated[str, Meta(extra_json_schema={"const": ANYWHERE})] | None


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one process, to which a subclass may add its own.

    Attributes:
        driver: name of the driver that moves the bytes. Peers need the same one.
        driver_options: options of that driver.
        curve_secret_key: where this process's secret key is, ``file:PATH`` or ``env:NAME``. With
            it, the side channel is encrypted.
        curve_peers: the peers' public keys, or places of texts with one key per line. Files are
            read again when they change, by ``kvferry.core.security.SecurityFiles``.
        allowed_peers: networks that peers must be in, or ``"anywhere"``. By default, this host and
            private networks.
    """

    driver: Annotated[str, Meta(min_length=1)] = DEFAULT_DRIVER
    driver_options: dict[str, Any] = {}
    curve_secret_key: Annotated[str, Meta(max_length=4096)] = ""
    curve_peers: Sources = ()
    allowed_peers: AllowedPeers = None

    def __post_init__(self) -> None:
        if isinstance(self.allowed_peers, str) and self.allowed_peers != ANYWHERE:
            raise ValueError(
                f"{self.allowed_peers[:100]!r} is neither a list of networks, such as "
                f"['10.0.0.0/8'], nor {ANYWHERE!r} - at `$.allowed_peers`"
            )

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """Return settings from names and values; raise ``ValueError``, which lists all names."""
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as exc:
            known = ", ".join(cls.__struct_fields__)
            raise ValueError(f"kvferry's settings: {exc}; there are {known}") from exc

    def access(self, host: str) -> Access:
        """Return which peers are admitted to a side channel at ``host``, and warn if it is open.

        Reads keys from where the settings say. Raises ``SecretError``, without any secret.
        """
        access, exposed, problems = self.examine()
        if problems:
            raise SecretError("; ".join(problems))
        for risk in (*exposed, *open_access_risks(access, host)):
            logger.warning("%s", risk)
        return access

    def examine(self) -> tuple[Access, list[str], list[str]]:
        """Return which peers are admitted, warnings of exposed secrets, and what is wrong.

        Reads keys from where the settings say. No text has a secret in it.
        """
        exposed: list[str] = []
        problems: list[str] = []
        own, peers, networks, access = None, PeerKeys(), Networks.nearby(), NEARBY
        with noted(problems, "curve_secret_key: "):
            if self.curve_secret_key:
                secret = read_secret(self.curve_secret_key)
                own = KeyPair.of(secret.text, secret.source)
                exposed = [secret.exposed] if secret.exposed else []
        with noted(problems, "curve_peers: "):
            peers = PeerKeys(listed_keys(self.curve_peers, "curve_peers"))
        with noted(problems):
            if isinstance(self.allowed_peers, tuple):
                networks = Networks.of(self.allowed_peers)
        with noted(problems):
            if not problems:
                anywhere = self.allowed_peers == ANYWHERE
                access = Access(own=own, peers=peers, networks=None if anywhere else networks)
        return access, exposed, problems


@contextmanager
def noted(problems: list[str], setting: str = "") -> Iterator[None]:
    """Add a ``SecretError`` to ``problems``, instead of raising it."""
    try:
        yield
    except SecretError as exc:
        problems.append(f"{setting}{exc}")


def open_access_risks(access: Access, host: str) -> Iterator[str]:
    """Yield a warning for each setting that does not suit ``host``, unless that is this host."""
    if is_loopback_host(host):
        return
    if access.own is None:
        yield (
            f"the side channel at {host} is open: whoever reaches it learns where this engine's "
            "KV cache is and how to read it, and nothing there is encrypted. Set curve_secret_key "
            "and curve_peers ('kvferry keygen' makes keys), or let only your engines reach it"
        )
    if _excludes_its_own_network(access, host):
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
