"""The cells of the tables of faults in docs/reliability.md, and the reports of their tests.

``KVFERRY_FAULTS_REPORT`` names a file to which each test adds a line of JSON for its cell or
figure; ``tests.faults.report`` makes the tables from such files.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvferry.core.transport import Quiescence
from kvferry.testing import Fault

REPORT = "KVFERRY_FAULTS_REPORT"

SIDES = ("producer", "consumer")
FAULTS = (
    "killed",
    "stopped",
    "cut off",
    "slow",
    "garbage",
    "restarted",
    "aborted",
    "out of blocks",
)
STAGES = ("before the handshake", "during the handshake", "reading", "fencing", "finishing")
"""The stages of a load. Finishing: the fence is final, and not yet reported to the engine."""


class Key(NamedTuple):
    """A cell. ``where`` names its table: a driver, a quiescence, or a deployment."""

    side: str
    fault: str
    stage: str
    where: str = "loopback"


MATRIX = [Key(side, fault, stage) for side in SIDES for fault in FAULTS for stage in STAGES]
DRIVERS = ("nixl", "ucx")
"""The drivers, other than loopback, that need no special hardware."""
OVER = os.environ.get("KVFERRY_FAULTS_OVER", "loopback")
"""The driver of the tests in this run. A process should not load both NIXL's UCX and another."""
DRIVER_FAULTS = {
    "producer": ("killed", "stopped", "restarted", "aborted", "out of blocks"),
    "consumer": ("killed", "stopped", "restarted", "aborted"),
}
"""The faults that are also tried over each of ``DRIVERS``."""
OVER_DRIVERS = [
    Key(side, fault, stage, driver)
    for driver in DRIVERS
    for side, faults in DRIVER_FAULTS.items()
    for fault in faults
    for stage in STAGES
]
WAITING = [Key("consumer", fault, "waiting") for fault in ("killed", "stopped", "slow", "aborted")]
"""Faults of a consumer that has a ticket and waits for free pages."""
COMPUTING = [Key("producer", fault, "computing") for fault in ("killed", "stopped", "restarted")]
PESTERED = [Key("producer", "pestered", stage) for stage in STAGES]
"""Other clients connect to the producer's side channel and send random bytes."""
FAULTY_DRIVER = [
    Key("driver", fault.value, stage, quiescence.value)
    for fault in Fault
    if fault is not Fault.LIE
    for stage in ("reading", "fencing")
    for quiescence in Quiescence
]
CABLE = "ucx over a cable"
NETWORKS = [Key("producer", "cut off", stage, CABLE) for stage in STAGES]
"""The link between two network namespaces is cut."""
VLLM = [
    Key("producer", "killed", "before the read", "vllm"),
    *[
        Key("producer", fault, "reading", where)
        for where in ("vllm", "vllm over nixl", "vllm over ucx")
        for fault in ("killed", "killed, and decode recomputes")
    ],
    Key("producer", "stopped", "before the handshake", "vllm"),
    Key("producer", "cut off", "before the handshake", "vllm"),
    Key("producer", "pestered", "before the read", "vllm"),
    Key("producer", "restarted", "before the read", "vllm"),
    Key("producer", "aborted", "computing", "vllm"),
    Key("producer", "aborted", "after the ticket", "vllm"),
    Key("producer", "out of blocks", "before the read", "vllm"),
    Key("producer", "shut down", "before the read", "vllm"),
    Key("consumer", "killed", "reading", "vllm"),
    Key("consumer", "restarted", "reading", "vllm"),
    Key("consumer", "slow", "before the handshake", "vllm"),
    Key("consumer", "slow", "reading", "vllm"),
    Key("consumer", "busy", "waiting", "vllm"),
    Key("consumer", "aborted", "before the handshake", "vllm"),
    Key("consumer", "aborted", "reading", "vllm"),
]
CELLS = frozenset(
    [*MATRIX, *OVER_DRIVERS, *WAITING, *COMPUTING, *PESTERED, *FAULTY_DRIVER, *NETWORKS, *VLLM]
)


@dataclass(kw_only=True)
class Cell:
    side: str
    fault: str
    stage: str
    driver: str = "loopback"
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        assert self.key in CELLS, f"{self.key} is not in the table: add it to tests.faults.cells"

    @property
    def key(self) -> Key:
        return Key(self.side, self.fault, self.stage, self.driver)

    def start_clock(self) -> None:
        self.begun = time.monotonic()

    def write(self, outcome: str, seconds: float | None = None) -> None:
        """Add the outcome to the report, if one is wanted; ``seconds`` is the time until now."""
        took = time.monotonic() - self.begun if seconds is None else seconds
        _add(self.key._asdict() | {"outcome": outcome, "seconds": round(took, 2)})


def figure(name: str, seconds: float, **values: str | float) -> None:
    """Add the figures of a long test to the report, if one is wanted."""
    _add({"figure": name, **values, "seconds": round(seconds, 1)})


def _add(line: dict[str, object]) -> None:
    if path := os.environ.get(REPORT):
        with Path(path).open("a", encoding="utf-8") as report:
            report.write(json.dumps(line) + "\n")
