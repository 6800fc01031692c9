"""Transfers by NIXL's own Python API, with which the drivers are compared."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from kvferry.core.memory import Region
from kvferry.core.transport.copies import Copies
from kvferry.drivers.nixl import address, library
from kvferry.drivers.nixl.options import NixlOptions

THREADS = 4  # of NIXL's UCX, as in vLLM's own connector


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Within the context, progress threads of new agents sleep for as long as the driver's.

    A thread that spins would take a core from whatever else is measured. NIXL's Python API has no
    argument for it, and passes 0: the thread never sleeps.
    """
    native = library.load().api.nixlBind
    make = native.nixlAgent

    def made(name: str, config: Any) -> Any:
        config.pthrDelay = NixlOptions().progress_milliseconds * 1000
        return make(name, config)

    with mock.patch.object(native, "nixlAgent", made):
        yield


def agent(region: Region, peer: bytes) -> tuple[Any, str]:
    """Return an agent that has registered a region of CPU memory, and the name of its peer, whose
    address is that of a ``NixlTransport``."""
    made = bare()
    made.register_memory([(region.address, region.nbytes, region.device, "")], "DRAM")
    theirs = address.decode(peer)
    made.add_remote_agent(theirs.metadata)
    return made, theirs.name


def bare() -> Any:
    """Return an agent over UCX without memory and peers."""
    api = library.load().api
    sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    with patient():
        config = api.nixl_agent_config(backends=[], sync_mode=sync)
        made = api.nixl_agent(f"direct-{secrets.token_hex(8)}", config)
    made.create_backend("UCX", {"num_threads": str(THREADS)})
    return made


def mover(agent: Any, name: str, copies: Copies, notify: bytes = b"") -> Callable[[], float]:
    """Return a function that reads, and returns when the transfer was posted."""
    local, remote = np.zeros((2, len(copies), 3), np.uint64)

    def move() -> float:
        # Filling these arrays, which have NIXL's form, counts.
        local[:, 0], remote[:, 0] = copies.local, copies.remote
        local[:, 1] = remote[:, 1] = copies.nbytes
        here, there = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
        handle = agent.initialize_xfer("READ", here, there, name, notify)
        state = agent.transfer(handle)
        submitted = time.perf_counter()
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise SystemExit(f"NIXL's transfer ended as {state}")
        return submitted

    return move
