"""The faults that the simulation must find, planted one at a time, from ``faults.txt``.

Each is a block of lines: its name and the class that it changes, how (``-`` lines are replaced by
``+`` lines; ``@`` separates places), and the actions (``>``), after the options of the simulation,
that then break an invariant (``=>``). "table" marks those that are found by comparing slot words
and outcomes with the table in docs/protocol.md, since they violate another invariant only rarely.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.host_pages import HostPages
from kvferry.core.lifecycle.leased_holds import LeasedHolds
from kvferry.core.lifecycle.load_machine import LoadMachine
from kvferry.core.lifecycle.renewal_schedule import Renewals
from kvferry.core.lifecycle.scheduler_holds import SchedulerHolds
from kvferry.core.lifecycle.silent_holds import BlockPressure
from tests.core.lifecycle import turns
from tests.core.lifecycle.consumer_rank import ConsumerRank
from tests.core.lifecycle.engine import Engine, Rank
from tests.core.lifecycle.fabric import Components
from tests.core.lifecycle.producer_rank import ProducerRank
from tests.core.lifecycle.world import Options

PATH = Path(__file__).with_name("faults.txt")
REAL = (BlockPressure, HoldUsers, HostPages, LeasedHolds, LoadMachine, Renewals, SchedulerHolds)
CLASSES = {each.__name__: each for each in (*REAL, ConsumerRank, Engine, ProducerRank, Rank)}
_DEFAULTS = asdict(Options())
_source = functools.cache(inspect.getsource)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Actions that break an invariant, whose name is ``found``."""

    found: str
    options: Options
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A planted fault, and the walk that finds it; ``lines`` are those before the walk."""

    lines: tuple[str, ...]
    changed: type
    by_table: bool
    walk: Walk

    def components(self) -> Components:
        source = _source(self.changed)
        diff = "\n".join(line for line in self.lines if line[:2] in ("- ", "+ ", "  ", "@"))
        for place in diff.split("\n@\n"):
            old, new = (
                [line[2:] for line in place.split("\n") if line[0] != other] for other in "+-"
            )
            pattern = "^( *)" + "\n\\1".join(map(re.escape, old)) + "$"
            indented = functools.partial(_indented, new)
            source, count = re.subn(pattern, indented, source, flags=re.MULTILINE)
            if count != 1:
                raise ValueError(f"{self.lines}: {count} places in {self.changed} have {old}")
        names = vars(turns) | vars(sys.modules[self.changed.__module__])
        exec(source, names)
        return Components(self.changed, names[self.changed.__name__], strict=self.by_table)


def _indented(lines: list[str], match: re.Match[str]) -> str:
    return textwrap.indent("\n".join(lines), match[1])


def _parse(block: str) -> tuple[str, Fault]:
    *lines, last = block.split("\n")
    name, changed, *table = next(line for line in lines if line[0] not in "#").split(" | ")
    text, _, found = last.removeprefix("> ").rpartition(" => ")
    actions = text.split("; ")
    options: dict[str, Any] = {}
    if actions[0].startswith("with "):
        pairs = (word.split("=") for word in actions.pop(0).split()[1:])
        options = {key: value if key == "plans" else int(value) for key, value in pairs}
    walk = Walk(found=found, options=Options(**options), actions=tuple(actions))
    fault = Fault(lines=tuple(lines), changed=CLASSES[changed], by_table=bool(table), walk=walk)
    return name, fault


def _blocks() -> list[str]:
    return PATH.read_text().rstrip("\n").split("\n\n")


PLANTED = dict(_parse(block) for block in _blocks() if "\n" in block)


def write_walk(name: str, walk: Walk) -> None:
    """Write a walk that finds a fault in place of the one that ``faults.txt`` has."""
    options = (
        f"{k}={int(v) if v is True else v}"
        for k, v in asdict(walk.options).items()
        if v != _DEFAULTS[k]
    )
    begin = " ".join(("with", *options)) + "; "
    text = ("" if begin == "with; " else begin) + "; ".join(walk.actions)
    fault = replace(PLANTED[name], walk=walk)
    new = "\n".join((*fault.lines, f"> {text} => {walk.found}"))
    blocks = [new if "\n" in block and _parse(block)[0] == name else block for block in _blocks()]
    PATH.write_text("\n\n".join(blocks) + "\n")
