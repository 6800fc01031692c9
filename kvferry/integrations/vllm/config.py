"""The connector's settings: the keys of ``kv_connector_extra_config``, validated.

``Config`` documents every setting, with its unit, range and default.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.core.errors import KVFerryError
from kvferry.core.peer_settings import DEFAULT_DRIVER, AllowedPeers, PeerSettings, Source, Sources
from kvferry.integrations.vllm import transfer_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HIGHEST_PORT = 65535

NIXL_KEYS = {
    "backends": "an agent has one backend; name it in driver_options, as backend",
    "num_threads": "pass it to a driver that has it, in driver_options",
    "push_registration_timeout": "there is no push mode yet; decode pulls",
}
"""NixlConnector's keys that ``Config`` does not have, each with what to do instead, or why not."""

NIXL_ENVIRONMENT = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "side_channel_host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "side_channel_port",
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "kv_lease_duration",
}
"""NixlConnector's environment variables, each with the key of ``Config`` that replaces it."""


class ConfigError(KVFerryError, ValueError):
    """The engine's configuration is refused; the message names the setting and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one engine: ``kv_connector_extra_config``, validated.

    Numbers outside their range and unknown keys are refused at start.

    Attributes:
        driver: Name of the driver that moves the bytes; ``kvferry drivers`` lists those that are
            installed. Both engines need the same one.
        driver_options: Options of that driver, passed on as they are.
        side_channel_host: Address on which this engine serves its layouts. It goes into tickets,
            so decode must be able to reach it. The default is for engines of one host.
        side_channel_port: Port of the side channel. 0 takes a free port; to any other port, the
            engine's data-parallel index is added.
        kv_lease_duration: For how many seconds a finished request's pages are kept for decode,
            which renews the lease while the request waits. While requests on prefill wait for
            blocks, pages for which no decode engine gave a sign of life for 3 s are given up early.
        max_held_fraction: How much of the cache may be kept for decode, as a fraction of its
            blocks, answers that are kept for the next turn included. Beyond this limit, the pages
            of the oldest tickets are given up, and their requests prefill again. Set a lower limit
            where clients could pin the cache. Ignored where the cache is staged.
        bidirectional_kv_xfer: Whether the next turn of a conversation loads, from the engine that
            decoded the last answer, what that engine computed. Set it on both engines, with
            ``kv_role`` "kv_both" (docs/vllm.md, "The second turn").
        kv_recompute_threshold: The least number of tokens that such a turn loads; fewer are
            computed.
        decoder_kv_blocks_ttl: For how many seconds an answer's pages are kept for the next turn;
            once that turn waits for them, for ``kv_lease_duration``. They are given up early while
            requests of the engine wait for blocks.
        staging: Whether pages are handed over by way of host memory, although the driver could
            reach the cache. Where no driver can, set ``kv_buffer_device`` "cpu" instead, which has
            the same effect (docs/vllm.md, "Staging").
        staging_bytes: How many bytes of pinned host memory each rank has for that. By default 4
            GiB, or more if a request of ``max_model_len`` tokens needs more, but no more than the
            cache has. With ``kv_role`` "kv_both", half of it is for prompts that are prefilled
            here, and half for loads.
        staging_timeout: For how many seconds a request waits for room in that memory. On prefill it
            then gets no ticket; on decode its ticket is refused.
        drain_timeout: For how many seconds a worker that is told to stop waits for decode to read
            the pages that are kept for it. ``vllm serve`` itself ends engines at once; give it
            ``--shutdown-timeout`` (seconds), so that held pages are still served after SIGTERM
            (docs/protocol.md, Shutting down).
        handshake_timeout: After how many seconds a handshake fails.
        load_timeout: After how many seconds a load fails, counted from when it has blocks to fill.
        liveness_interval: Seconds between two pings of a producer; 0 sends none.
        liveness_misses: After how many pings without an answer a producer counts as dead.
        engine_ttl: After how many seconds a producer that no request uses is disconnected.
        enforce_handshake_compat: Refuse a producer whose model's name, revision or settings for
            images and other media differ; with ``false``, only log a warning. Differences that
            would corrupt data (types, scales, layouts) are refused either way.
        verify_prompt: Refuse a ticket that was made for another prompt. Turn it off only in tests
            that swap caches on purpose.
        log_requests: Log one line per request on either engine, at INFO by the logger
            ``kvferry.requests``: prefill, how long the request's pages were held and how that
            ended; decode, what was loaded, how long it waited and how long the read took. By
            default the lines are at DEBUG, and vLLM's line of metrics sums up each 10 seconds.
            Failures are logged either way.
        ticket_secrets: Where secrets are, ``file:PATH`` or ``env:NAME`` each, with one secret per
            line. Files are read again when they change, without a restart. The first secret signs
            tickets; tickets signed with any of the secrets are accepted, and unsigned tickets
            are refused. Without secrets, a ticket needs a proof. A proof shows that the engine
            which the ticket names made the ticket, but not that the named engine is one of yours.
        curve_secret_key: Where this engine's secret key is, ``file:PATH`` or ``env:NAME``. With it,
            the side channel is encrypted. Another key takes effect with a restart.
        curve_peers: Public keys of the engines to exchange pages with. Each entry is a key, or the
            place (``file:PATH`` or ``env:NAME``) of a text with one key per line. Files are read
            again when they change, without a restart.
        allowed_peers: Networks in CIDR notation, such as ``["10.0.0.0/8"]``, in which peers must
            be: those that connect to this engine, and those to which this engine connects.
            ``"anywhere"`` allows all addresses. By default, this host and private networks.
    """

    driver: Annotated[str, Meta(min_length=1)] = DEFAULT_DRIVER
    driver_options: dict[str, Any] = field(default_factory=dict)
    side_channel_host: Annotated[str, Meta(min_length=1, max_length=256)] = "127.0.0.1"
    side_channel_port: Annotated[int, Meta(ge=0, le=HIGHEST_PORT)] = 0
    kv_lease_duration: Annotated[float, Meta(ge=0.001, le=86400)] = 30.0
    max_held_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    bidirectional_kv_xfer: bool = False
    kv_recompute_threshold: Annotated[int, Meta(ge=0, le=1 << 32)] = 64
    decoder_kv_blocks_ttl: Annotated[float, Meta(ge=0.001, le=86400)] = 480.0
    staging: bool = False
    staging_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None
    staging_timeout: Annotated[float, Meta(ge=0, le=86400)] = 10.0
    drain_timeout: Annotated[float, Meta(ge=0, le=86400)] = 2.0
    handshake_timeout: Annotated[float, Meta(ge=0.001, le=3600)] = 10.0
    load_timeout: Annotated[float, Meta(ge=0.001, le=86400)] = 60.0
    liveness_interval: Annotated[float, Meta(ge=0, le=3600)] = 5.0
    liveness_misses: Annotated[int, Meta(ge=1, le=1000)] = 3
    engine_ttl: Annotated[float, Meta(ge=0.001, le=86400 * 365)] = 600.0
    enforce_handshake_compat: bool = True
    verify_prompt: bool = True
    log_requests: bool = False
    ticket_secrets: Annotated[tuple[Source, ...], Meta(max_length=8)] = ()
    curve_secret_key: Annotated[str, Meta(max_length=4096)] = ""
    curve_peers: Sources = ()
    allowed_peers: AllowedPeers = None

    @property
    def peer_settings(self) -> PeerSettings:
        """Those of the settings that every integration has."""
        return msgspec.convert(self, PeerSettings, from_attributes=True)


KEYS = tuple(f.name for f in fields(Config))
"""The names of all settings."""


def schema() -> dict[str, Any]:
    """Return the JSON schema of ``kv_connector_extra_config``, with a description of each key."""
    _, definitions = msgspec.json.schema_components([Config])
    made: dict[str, Any] = definitions["Config"]
    described = attributes(inspect.getdoc(Config) or "")
    for name, setting in made["properties"].items():
        setting["description"] = described[name].replace("``", "`")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": "kv_connector_extra_config of KVFerryConnector",
        "description": "The settings of one engine.",
        "additionalProperties": False,
    }


def attributes(docstring: str) -> dict[str, str]:
    """Return the descriptions in the ``Attributes`` section of a docstring, each on one line."""
    _, _, section = docstring.partition("\nAttributes:\n")
    section, *_ = re.split(r"^(?=\S)", section, maxsplit=1, flags=re.MULTILINE)
    entries = re.split(r"^ {4}(\w+)(?: \([^)]*\))?:", section, flags=re.MULTILINE)[1:]
    names, texts = entries[::2], entries[1::2]
    return {name: " ".join(text.split()) for name, text in zip(names, texts, strict=True)}


def problems(extra: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with ``kv_connector_extra_config``, each with the remedy."""
    unknown = [_unknown_key(key) for key in extra if key not in KEYS]
    if unknown:
        unknown[-1] += f" The keys are {', '.join(KEYS)}"
    known = ((key, value) for key, value in extra.items() if key in KEYS)
    return [*unknown, *filter(None, itertools.starmap(_value_problem, known))]


def acceptable(extra: Mapping[str, Any]) -> Config:
    """Return the settings but for those that ``problems`` refuses, so that others are checked."""
    return msgspec.convert(
        {key: value for key, value in extra.items() if not problems({key: value})}, Config
    )


def parse(extra: Mapping[str, Any], *, data_parallel_index: int = 0) -> Config:
    """Return the settings in ``kv_connector_extra_config``, or raise ``ConfigError``."""
    if found := problems(extra):
        raise ConfigError("; ".join(found))
    config = msgspec.convert(dict(extra), Config)
    return with_index(config, data_parallel_index)


def with_index(config: Config, data_parallel_index: int) -> Config:
    """Return settings with a data-parallel engine's port; ``ConfigError`` if it is none."""
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
    """Return the validated settings of an engine, or raise ``ConfigError``."""
    return parse(
        vllm_config.kv_transfer_config.kv_connector_extra_config,
        data_parallel_index=vllm_config.parallel_config.data_parallel_index,
    )


def risks(config: Config, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a warning if environment variables are ignored, and one for each unsafe setting."""
    ignored = [
        f"{name} (set {NIXL_ENVIRONMENT.get(name, 'driver_options')} instead)"
        for name in sorted(environment)
        if name.startswith("VLLM_NIXL_")
    ]
    if ignored:
        yield f"ignored, since they are NixlConnector's: {', '.join(ignored)}"
    if not config.verify_prompt:
        yield (
            "verify_prompt is false: a ticket that was made for another prompt is accepted, and "
            "its pages enter the prefix cache under this one; for tests only"
        )


def _unknown_key(key: str) -> str:
    if key in (*transfer_config.KEYS, *transfer_config.OLD_KEYS):
        return f"{key!r} belongs beside kv_connector, not into kv_connector_extra_config: move it"
    if key in NIXL_KEYS:
        return (
            f"{key!r} in kv_connector_extra_config is NixlConnector's: {NIXL_KEYS[key]}. Remove it."
        )
    [nearest] = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.0)
    return f"unknown key {key!r} in kv_connector_extra_config: did you mean {nearest!r}?"


def _value_problem(key: str, value: object) -> str | None:
    """Return why the value of a setting is refused; ``None`` if it is accepted."""
    try:
        _ = msgspec.convert({key: value}, Config).peer_settings
    except msgspec.ValidationError as exc:
        return f"kv_connector_extra_config: {exc}"
    return None
