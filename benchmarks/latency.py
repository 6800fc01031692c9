"""What one small thing takes between two processes: a page, a fence, a notification."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import common
import nixl_api
import numpy as np
import peer_process
import rows

from kvferry.core.transport import PeerId, Transport
from kvferry.core.transport.copies import Copies, copies_between

PAGE = 16 << 10
"""16 tokens of a layer's K and V with two heads of 128 on a rank, in bfloat16."""

FENCE = 8
SECTION = "latency between two processes"
NIXL, CALL = "NIXL's own calls", "a call to the other process over a socket"
PAGE_CASE, FENCE_CASE = "read of a page of 16 KiB", "fence: read of 8 bytes and a notification"
NOTIFICATION_CASE = "notification, one way"
FIGURES = {PAGE_CASE: (PAGE, b""), FENCE_CASE: (FENCE, peer_process.DONE)}
MOST = {PAGE_CASE: 1.5, FENCE_CASE: 1.2, NOTIFICATION_CASE: 1.2}
"""The targets, beside NIXL's own calls."""


def measured(lab: Any, rounds: int, show: rows.Show) -> list[rows.Row]:
    """Of every driver, beside NIXL's own calls; where there is no NIXL, beside a call's socket."""
    found: list[rows.Row] = []
    for driver, (transport, peer) in lab.transports.items():
        show(f"latency of {driver}")
        found += _reads(lab, driver, transport, peer, rounds)
        found.append(_notification(lab, driver, transport, peer, rounds))
    return found


def _reads(
    lab: Any, driver: str, transport: Transport, peer: PeerId, rounds: int
) -> Iterator[rows.Row]:
    for case, (nbytes, message) in FIGURES.items():
        copies = _one(lab, driver, nbytes)
        ours = common.mover(transport, peer, copies, notify=message or None)
        of, theirs = _reference(lab, nbytes, message)
        yield _row(driver, case, of, _microseconds(rounds, [ours, theirs]))


def _one(lab: Any, driver: str, nbytes: int) -> Copies:
    near, remote = lab.near.region, lab.others[driver].region
    return copies_between([(near.address, remote.address, nbytes)], local=near, remote=remote)


def _reference(lab: Any, nbytes: int, message: bytes) -> tuple[str, Callable[[], object]]:
    if "nixl" not in lab.transports:
        return CALL, _call(lab)
    process = lab.others["nixl"]
    agent, name = nixl_api.agent(lab.near.region, process.address(), peer_process.THREADS)
    return NIXL, nixl_api.mover(agent, name, _one(lab, "nixl", nbytes), message)


def _call(lab: Any) -> Callable[[], object]:
    [process, *_] = lab.others.values()
    asked: Callable[[], object] = process.nothing
    return asked


def _microseconds(rounds: int, calls: list[Callable[[], object]]) -> common.Times:
    """(ways, rounds)."""
    found: common.Times = common.by_turns(rounds, [common.timed(call) for call in calls])
    return found[:, :, 0] * 1e6


def _notification(
    lab: Any, driver: str, transport: Transport, peer: PeerId, rounds: int
) -> rows.Row:
    process = lab.others[driver]
    ours = _ping(process, ("echo", transport.address()), _by_driver(transport, peer))
    if "nixl" in lab.transports:
        of, theirs = NIXL, _ping(process, ("echo_direct",), _by_nixl(process))
    else:
        of, theirs = CALL, _halved(_call(lab))
    times = common.by_turns(max(2, rounds // 20), [ours, theirs])[:, :, 0] * 1e6
    return _row(driver, NOTIFICATION_CASE, of, times)


PINGS = 20


def _ping(process: Any, command: tuple[Any, ...], once: Callable[[], None]) -> common.Way:
    """A way whose step is the median of some notifications there and back, halved."""

    def way() -> list[float]:
        process.begin_echo(*command, PINGS)
        found = []
        for _ in range(PINGS):
            start = time.perf_counter()
            once()
            found.append(time.perf_counter() - start)
        process.end_echo()
        return [float(np.median(found)) / 2]

    return way


def _by_driver(transport: Transport, peer: PeerId) -> Callable[[], None]:
    def once() -> None:
        transport.notify(peer, peer_process.MESSAGE)
        while not transport.notifications():
            time.sleep(0)  # a driver's own thread needs the interpreter

    return once


def _by_nixl(process: Any) -> Callable[[], None]:
    agent = nixl_api.bare(peer_process.THREADS)
    name = agent.add_remote_agent(process.ask("agent", agent.get_agent_metadata()))

    def once() -> None:
        agent.send_notif(name, peer_process.MESSAGE)
        while not agent.get_new_notifs():
            time.sleep(0)

    return once


def _halved(call: Callable[[], object]) -> common.Way:
    def way() -> list[float]:
        start = time.perf_counter()
        for _ in range(PINGS):
            call()
        return [(time.perf_counter() - start) / PINGS / 2]

    return way


def _row(driver: str, case: str, of: str, times: common.Times) -> rows.Row:
    ours, theirs = times
    found = common.ratio(ours, theirs)
    return rows.compared(
        found,
        section=SECTION,
        case=f"{driver}, {case}",
        measured=float(f"{np.median(ours):.3g}"),
        unit="µs",
        of=f"time of {of}",
        target=rows.goal(MOST[case], at_least=False) if of == NIXL else None,
    )
