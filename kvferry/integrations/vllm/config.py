"""The connector's settings: the keys of ``kv_connector_extra_config``, validated.

``Config`` documents every setting, with its unit, range and default.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.core.errors import KVFerryError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

HIGHEST_PORT = 65535
ANYWHERE = "anywhere"
"""The value of ``allowed_peers`` that accepts every address."""

Source = Annotated[str, Meta(min_length=1, max_length=4096)]
"""Where a key or secret is: ``file:PATH`` or ``env:NAME``; for a public key also the key itself."""

NIXL_KEYS = {
    "backends": "pass them to a driver that has them, in driver_options",
    "num_threads": "pass it to a driver that has it, in driver_options",
    "push_registration_timeout": "there is no push mode yet; decode pulls",
    "bidirectional_kv_xfer": "there is no second turn, from decode back to prefill, yet",
    "kv_recompute_threshold": "there is no second turn, from decode back to prefill, yet",
    "decoder_kv_blocks_ttl": "there is no second turn, from decode back to prefill, yet",
}
"""NixlConnector's keys that do not exist here, each with the remedy."""

NIXL_ENVIRONMENT = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "side_channel_host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "side_channel_port",
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "kv_lease_duration",
}
"""NixlConnector's environment variables, each with the setting that replaces it here."""


class ConfigError(KVFerryError, ValueError):
    """The engine's configuration is refused; the message names the setting and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one engine: ``kv_connector_extra_config``, validated.

    Numbers outside their range and unknown keys are refused at start.
    """

    driver: Annotated[str, Meta(min_length=1)] = "loopback"
    """Name of the transport driver that moves the pages; ``kvferry drivers`` lists those that are
    installed. Both engines must use the same one."""

    driver_options: dict[str, Any] = field(default_factory=dict)
    """Options of the driver, passed on unchanged. The driver checks them."""

    side_channel_host: Annotated[str, Meta(min_length=1, max_length=256)] = "127.0.0.1"
    """Host name or address on which the side channel (handshake and health) listens. Tickets name
    it too, so engines on other hosts need an address that they can reach. 1 to 256 characters."""

    side_channel_port: Annotated[int, Meta(ge=0, le=HIGHEST_PORT)] = 0
    """TCP port of the side channel, 0 to 65535. 0 takes a free port; to another number the
    data-parallel index of the engine is added."""

    kv_lease_duration: Annotated[float, Meta(ge=0.001, le=86400)] = 30.0
    """Seconds for which a producer holds the pages of a finished request for its consumer, 0.001 to
    86400. The consumer renews the lease while the request waits."""

    max_held_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """The fraction of the cache's blocks that may be held for consumers, above 0 and up to 1. If
    more would be held, the oldest ticket is given up."""

    drain_timeout: Annotated[float, Meta(ge=0, le=86400)] = 2.0
    """Seconds for which a worker that vLLM shuts down waits until held pages have been read, 0 to
    86400 (docs/protocol.md, Shutting down)."""

    handshake_timeout: Annotated[float, Meta(ge=0.001, le=3600)] = 10.0
    """Seconds within which a producer must answer the handshake, 0.001 to 3600."""

    load_timeout: Annotated[float, Meta(ge=0.001, le=86400)] = 60.0
    """Seconds that a load may take, 0.001 to 86400, from the time that its request has blocks to
    load into."""

    liveness_interval: Annotated[float, Meta(ge=0, le=3600)] = 5.0
    """Seconds between two pings of a producer, 0 to 3600. 0 turns pings off."""

    liveness_misses: Annotated[int, Meta(ge=1, le=1000)] = 3
    """After how many unanswered pings in a row a producer counts as dead, 1 to 1000."""

    engine_ttl: Annotated[float, Meta(ge=0.001, le=86400 * 365)] = 600.0
    """Seconds after which a producer that is not used is disconnected, 0.001 to 31536000 (a
    year)."""

    enforce_handshake_compat: bool = True
    """Whether a producer is refused that differs only in a name, such as that of the model or its
    revision. If false, such a difference is logged; differences that would corrupt the cache are
    always refused."""

    verify_prompt: bool = True
    """Whether a ticket is refused that was made for another prompt. Set it to false only in tests
    that exchange caches on purpose."""

    ticket_secrets: Annotated[tuple[Source, ...], Meta(max_length=8)] = ()
    """Where the secrets are with which tickets are signed, ``file:PATH`` or ``env:NAME`` each; up
    to 8. The first one signs, and each of them is accepted. Empty leaves tickets unsigned."""

    curve_secret_key: Annotated[str, Meta(max_length=4096)] = ""
    """Where the secret key of this engine's side channel is, ``file:PATH`` or ``env:NAME``
    (``kvferry keygen`` makes one). With it the side channel is encrypted; empty leaves it
    unencrypted."""

    curve_peers: Annotated[tuple[Source, ...], Meta(max_length=4096)] = ()
    """Public keys of the engines that may ask this one's side channel and that this one may ask, or
    ``file:PATH`` or ``env:NAME`` of such keys; up to 4096."""

    allowed_peers: Annotated[tuple[Source, ...], Meta(max_length=4096)] | str | None = None
    """Networks in CIDR notation in which other engines must be, up to 4096, or ``"anywhere"``. By
    default (``None``) this host and private networks."""


KEYS = tuple(f.name for f in fields(Config))
"""The names of all settings."""


def parse(extra: Mapping[str, Any], *, data_parallel_index: int = 0) -> Config:
    """Validate what the user set.

    Args:
        extra: ``kv_connector_extra_config``.
        data_parallel_index: The engine's data-parallel index, which is added to a fixed port.

    Returns:
        The settings, with the port that this engine uses.

    Raises:
        ConfigError: A key is unknown, or a value has the wrong type or is out of range.
    """
    for key in extra:
        _check_key(key)
    try:
        config = msgspec.convert(dict(extra), Config)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"kv_connector_extra_config: {exc}") from exc
    if isinstance(config.allowed_peers, str) and config.allowed_peers != ANYWHERE:
        raise ConfigError(
            f"kv_connector_extra_config: {config.allowed_peers[:100]!r} is neither a list of "
            f"networks, such as ['10.0.0.0/8'], nor {ANYWHERE!r} - at `$.allowed_peers`"
        )
    if not config.side_channel_port:
        return config
    port = config.side_channel_port + data_parallel_index
    if port > HIGHEST_PORT:
        raise ConfigError(
            f"side_channel_port {config.side_channel_port} plus the data-parallel index "
            f"{data_parallel_index} is {port}: set one that leaves room below {HIGHEST_PORT}, or 0"
        )
    return replace(config, side_channel_port=port)


def engine_config(vllm_config: VllmConfig) -> Config:
    """Return the validated settings of an engine.

    Args:
        vllm_config: The engine's configuration.

    Raises:
        ConfigError: A setting is refused; see ``parse``.
    """
    return parse(
        vllm_config.kv_transfer_config.kv_connector_extra_config,
        data_parallel_index=vllm_config.parallel_config.data_parallel_index,
    )


def warn(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Log at start which environment variables are ignored, and which settings are unsafe.

    Args:
        config: The settings.
        environment: The environment variables.
    """
    ignored = [
        f"{name} (set {NIXL_ENVIRONMENT.get(name, 'driver_options')} instead)"
        for name in sorted(environment)
        if name.startswith("VLLM_NIXL_")
    ]
    if ignored:
        logger.warning("ignored, since they are NixlConnector's: %s", ", ".join(ignored))
    if not config.verify_prompt:
        logger.warning(
            "verify_prompt is false: a ticket that was made for another prompt is accepted, and "
            "its pages enter the prefix cache under this one; for tests only"
        )


def _check_key(key: str) -> None:
    """Refuse a key that is no setting, and name the nearest one.

    Raises:
        ConfigError: The key is unknown, or NixlConnector's.
    """
    if key in KEYS:
        return
    if key in NIXL_KEYS:
        raise ConfigError(
            f"{key!r} in kv_connector_extra_config is NixlConnector's: {NIXL_KEYS[key]}. "
            f"Remove it; the keys here are {', '.join(KEYS)}"
        )
    [nearest] = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.0)
    raise ConfigError(
        f"unknown key {key!r} in kv_connector_extra_config: did you mean {nearest!r}? "
        f"The keys are {', '.join(KEYS)}"
    )
