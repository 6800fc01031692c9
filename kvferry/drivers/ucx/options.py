"""The ``driver_options`` of ucx, and the settings of UCX that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvferry.core.transport.refusals import parse_options

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]

DEFAULT_SETTINGS: Mapping[str, str] = {
    # On one host: without it UCX reads through the peer, as soon as it is to notice that it died.
    "CMA_MEMORY_INVALIDATE": "y",
    # Emulated reads and writes can end the peer's process: see message_transfer.py.
    "PROTO_EMULATION_ENABLE": "n",
    # A peer that dies while nothing moves is noticed by asking.
    "KEEPALIVE_INTERVAL": "500ms",
    # Connecting must not hold everything up.
    "TCP_CONN_NB": "y",
    # UCX looks after everything that a worker has from the start. Otherwise UCX (1.22) may sleep on
    # the first message through shared memory, if its sender is interrupted while writing it.
    "ADAPTIVE_PROGRESS": "n",
    # Few calls of ucp_worker_progress for many bytes, since each call takes the interpreter's lock.
    "CMA_TX_QUOTA": "8",
    "TCP_TX_SEG_SIZE": "64k",
    "WARN_UNUSED_ENV_VARS": "n",
}
"""What the driver sets where this UCX knows the setting and the user does not set it."""


class UcxOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``driver_options`` of ucx.

    Attributes:
        transports: UCX's names of the transports that may be used (its UCX_TLS); none: all.
        devices: network devices that may be used (its UCX_NET_DEVICES); none: all.
        settings: any other settings of UCX, by UCX's names.
        library: the libucp to load; ``None``: the system's, else the wheel's.
        threads: 1: one thread serves peers and drives transfers; 2: one for each.
        deadline_seconds: a transfer in which nothing moves for this long fails.
        connect_seconds: how long a peer may take to answer.
    """

    transports: list[_Name] = []
    devices: list[_Name] = []
    settings: dict[_Name, Annotated[str, msgspec.Meta(max_length=4096)]] = {}
    library: _Name | None = None
    threads: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    deadline_seconds: _Seconds = 30.0
    connect_seconds: _Seconds = 5.0


def parse(options: Mapping[str, object]) -> UcxOptions:
    """Check the options of a user, and fill in defaults.

    Raises:
        DriverError: an option is unknown, of a wrong type or out of range.
    """
    return parse_options("ucx", UcxOptions, options)


def user_settings(options: UcxOptions) -> dict[str, str]:
    """Return what the user sets, by UCX's names without their prefix ``UCX_``."""
    given = {name.removeprefix("UCX_"): value for name, value in options.settings.items()}
    if options.transports:
        given["TLS"] = ",".join(options.transports)
    if options.devices:
        given["NET_DEVICES"] = ",".join(options.devices)
    return given
