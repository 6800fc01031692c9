"""The table of faults: which cells it has, and what its tests report of themselves.

``KVFERRY_FAULTS_REPORT`` names a file that gets a line of JSON for each cell and each figure;
``tests.faults.report`` makes the page of such files.
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
"""Finishing: the fence is final, and nobody has heard of it yet."""


class Key(NamedTuple):
    """A place in the table. ``where``: a driver, or what else a table of its own is about."""

    side: str
    fault: str
    stage: str
    where: str = "loopback"


MATRIX = [Key(side, fault, stage) for side in SIDES for fault in FAULTS for stage in STAGES]
DRIVERS = ("nixl", "ucx")
"""The other ones that need no special hardware."""
ELSEWHERE = {
    "producer": ("killed", "stopped", "restarted", "aborted", "out of blocks"),
    "consumer": ("killed", "stopped", "restarted", "aborted"),
}
"""What is tried over each of them, too."""
OVER = [
    Key(side, fault, stage, driver)
    for driver in DRIVERS
    for side, faults in ELSEWHERE.items()
    for fault in faults
    for stage in STAGES
]
WAITING = [Key("consumer", fault, "waiting") for fault in ("killed", "stopped", "slow", "aborted")]
"""For pages, with a ticket, while somebody else has them."""
COMPUTING = [Key("producer", fault, "computing") for fault in ("killed", "stopped", "restarted")]
PESTERED = [Key("producer", "pestered", stage) for stage in STAGES]
"""By strangers who send random bytes to its side channel."""
DRIVER = [
    Key("driver", fault.value, stage, quiescence.value)
    for fault in Fault
    if fault is not Fault.LIE
    for stage in ("reading", "fencing")
    for quiescence in Quiescence
]
CABLE = "ucx over a cable"
NETWORKS = [Key("producer", "cut off", stage, CABLE) for stage in STAGES]
"""By a cable between two networks that is pulled."""
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
CELLS = frozenset([*MATRIX, *OVER, *WAITING, *COMPUTING, *PESTERED, *DRIVER, *NETWORKS, *VLLM])


@dataclass(kw_only=True)
class Cell:
    """One place in the table, while it is tried."""

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

    def strikes(self) -> None:
        """The fault happens now: time runs from here."""
        self.begun = time.monotonic()

    def write(self, outcome: str, seconds: float | None = None) -> None:
        """Add a line to the report, if somebody wants one; as of now, unless ``seconds`` says."""
        took = time.monotonic() - self.begun if seconds is None else seconds
        _add(self.key._asdict() | {"outcome": outcome, "seconds": round(took, 2)})


def figure(name: str, seconds: float, **values: str | float) -> None:
    """Add what a long test has counted to the report, if somebody wants one."""
    _add({"figure": name, **values, "seconds": round(seconds, 1)})


def _add(line: dict[str, object]) -> None:
    if path := os.environ.get(REPORT):
        with Path(path).open("a", encoding="utf-8") as report:
            report.write(json.dumps(line) + "\n")
