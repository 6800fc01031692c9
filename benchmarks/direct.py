"""NIXL's own Python API, used directly: what the drivers are measured against."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.core.copies import Copies
from kvferry.core.memory import Region
from kvferry.drivers.nixl import address, library
from kvferry.drivers.nixl.options import Options


def agent(region: Region, peer: bytes, threads: int) -> tuple[Any, str]:
    """An agent over UCX that has registered a region, and its peer's name for it.

    Args:
        region: of this process.
        peer: the address of a ``NixlTransport``.
        threads: of UCX.
    """
    found = library.load()
    sync = found.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = found.api.nixl_agent_config(backends=[], sync_mode=sync)
    # As the driver does: what spins on one side would take a core from both.
    with found.patient(Options().progress_milliseconds):
        made = found.api.nixl_agent(f"direct-{secrets.token_hex(8)}", config)
    made.create_backend("UCX", {"num_threads": str(threads)})
    made.register_memory([(region.address, region.nbytes, 0, "")], "DRAM")
    theirs = address.decode(peer)
    made.add_remote_agent(theirs.metadata)
    return made, theirs.name


def mover(agent: Any, name: str, op: str, copies: Copies) -> Callable[[], float]:
    """As ``common.mover``, by NIXL's own calls."""
    local, remote = np.zeros((2, len(copies), 3), np.uint64)

    def move() -> float:
        # Somebody has to fill these arrays, whose form is NIXL's.
        local[:, 0], remote[:, 0] = copies.local, copies.remote
        local[:, 1] = remote[:, 1] = copies.nbytes
        here, there = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
        handle = agent.initialize_xfer(op.upper(), here, there, name)
        state = agent.transfer(handle)
        submitted = time.perf_counter()
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise SystemExit(f"NIXL's transfer ended as {state}")
        return submitted

    return move
