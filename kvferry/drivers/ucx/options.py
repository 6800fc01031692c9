"""The ``driver_options`` of ucx, and the settings of UCX that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]

REQUIRED_SETTINGS: Mapping[str, str] = {
    # Emulated reads can end the peer's process: see messages.py. Only the newer
    # protocols obey the second setting.
    "PROTO_ENABLE": "y",
    "PROTO_EMULATION_ENABLE": "n",
    # Nor may the peer's UCX move GPU memory on request (since 1.22, by default on some CPUs): it
    # does not check the addresses, and the bytes may land after the connection has ended.
    "PROTOS": "^get/rndv,put/rndv",
    # Without it UCX does not use cma on connections with error handling, and reads by the peer.
    "CMA_MEMORY_INVALIDATE": "y",
    # UCX asks the peer from time to time, and so notices a dead peer even while nothing moves.
    "KEEPALIVE_INTERVAL": "500ms",
    # Connect without blocking the worker.
    "TCP_CONN_NB": "y",
    # Poll all transports of a worker from the start. Otherwise UCX (1.22) may miss the first
    # message through shared memory, if its sender is interrupted while writing it.
    "ADAPTIVE_PROGRESS": "n",
}
"""Settings of UCX on which the driver's promises rest; they override the environment."""

TUNING_SETTINGS: Mapping[str, str] = {
    # Few calls of ucp_worker_progress for many bytes, since each call takes the interpreter's lock.
    "CMA_TX_QUOTA": "8",
    "TCP_TX_SEG_SIZE": "64k",
    # Without it UCX (1.21 and later) does not read by CUDA IPC where it finds no NVLink.
    "CUDA_IPC_ENABLE_GET_ZCOPY": "y",
    "WARN_UNUSED_ENV_VARS": "n",
}
"""Settings of UCX that only make it faster or quieter; the environment overrides them."""


def default_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's settings of UCX, without prefix ``UCX_``; the user's override them."""
    unset = {key: value for key, value in TUNING_SETTINGS.items() if f"UCX_{key}" not in environ}
    return {**REQUIRED_SETTINGS, **unset}


class UcxOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``driver_options`` of ucx.

    Attributes:
        transports: UCX's names of the transports to use (UCX_TLS); if empty, all.
        devices: the network devices to use (UCX_NET_DEVICES); if empty, all.
        settings: other settings of UCX, by UCX's names, with or without the prefix ``UCX_``. They
            override the driver's own settings and the environment.
        library: the path or name of the libucp to load; ``None`` for the system's, else the
            wheel's.
        threads: with 1, one thread both serves peers and drives transfers; with 2, each has its
            own.
        deadline_seconds: how long a transfer may make no progress before it fails.
        connect_seconds: how long a peer may take to answer ``connect``.
    """

    transports: list[_Name] = []
    devices: list[_Name] = []
    settings: dict[_Name, Annotated[str, msgspec.Meta(max_length=4096)]] = {}
    library: _Name | None = None
    threads: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    deadline_seconds: _Seconds = 30.0
    connect_seconds: _Seconds = 5.0


def user_settings(options: UcxOptions) -> dict[str, str]:
    """Return the user's settings of UCX, by UCX's names without the prefix ``UCX_``."""
    given = {name.removeprefix("UCX_"): value for name, value in options.settings.items()}
    if options.transports:
        given["TLS"] = ",".join(options.transports)
    if options.devices:
        given["NET_DEVICES"] = ",".join(options.devices)
    return given
