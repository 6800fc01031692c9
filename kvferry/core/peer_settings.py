"""The settings that users of every integration have: the driver, and which peers are admitted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from kvferry.core.errors import SecretError
from kvferry.core.security import Access, KeyPair, Networks, PeerKeys, listed_keys, read_secret
from kvferry.core.side_channel.sockets import is_loopback_host

logger = logging.getLogger(__name__)

ANYWHERE = "anywhere"
"""The value of ``allowed_peers`` that accepts every address."""

Source = Annotated[str, Meta(min_length=1, max_length=4096)]
Sources = Annotated[tuple[Source, ...], Meta(max_length=4096)]


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one process, to which a subclass may add its own.

    Attributes:
        driver: name of the driver that moves the bytes. Peers need the same one.
        driver_options: options of that driver.
        curve_secret_key: where this process's secret key is, ``file:PATH`` or ``env:NAME``. With
            it, the side channel is encrypted.
        curve_peers: the peers' public keys, or places of texts with one key per line.
        allowed_peers: networks that peers must be in, or ``"anywhere"``. By default, this host and
            private networks.
    """

    driver: Annotated[str, Meta(min_length=1)] = "loopback"
    driver_options: dict[str, Any] = {}
    curve_secret_key: Annotated[str, Meta(max_length=4096)] = ""
    curve_peers: Sources = ()
    allowed_peers: Sources | str | None = None

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
        own, networks = None, Networks.nearby()
        if self.curve_secret_key:
            secret = read_secret(self.curve_secret_key)
            own = KeyPair.of(secret.text, secret.source)
            if secret.exposed:
                logger.warning("%s", secret.exposed)
        if isinstance(self.allowed_peers, tuple):
            networks = Networks.of(self.allowed_peers)
        elif self.allowed_peers not in (None, ANYWHERE):
            raise SecretError(
                f"allowed_peers is {self.allowed_peers[:100]!r}: list networks, such as "
                f"['10.0.0.0/8'], or set it to {ANYWHERE!r}"
            )
        if own is None and not is_loopback_host(host):
            logger.warning(
                "the side channel at %s is open: whoever reaches it may read this process's cache. "
                "Set curve_secret_key and curve_peers ('kvferry keygen' makes keys)",
                host,
            )
        return Access(
            own=own,
            peers=PeerKeys(listed_keys(self.curve_peers, "curve_peers")),
            networks=None if self.allowed_peers == ANYWHERE else networks,
        )
