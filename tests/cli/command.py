"""Run the ``kvferry`` command: in this process, or in one of its own with drivers of a test."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

import kvferry
from kvferry.cli import main

ROOT = Path(kvferry.__file__).parents[1]
COMMAND = [sys.executable, "-W", "error", "-c", "from kvferry.cli import main; main()"]


class CommandResult(NamedTuple):
    """The exit status and output of a run of the command."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The printed words, independent of the width of the terminal."""
        return " ".join((self.out + self.err).split())


class ProcessLeftError(BaseException):
    """The command has called ``os._exit``."""


def leave(status: int) -> NoReturn:
    raise ProcessLeftError(status)


@dataclass(frozen=True)
class Command:
    """The ``kvferry`` command in this process."""

    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: str, width: int = 0) -> CommandResult:
        """Run the command, with its output in a terminal of this width, or in a pipe if it is 0."""
        terminal = {"FORCE_COLOR": "1", "TERM": "dumb", "LINES": "100"} if width else {}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in terminal.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["kvferry", *arguments])
            patch.setattr(os, "_exit", leave)
            patch.setenv("COLUMNS", str(width or 200))
            with pytest.raises(ProcessLeftError) as left:
                main()
        return CommandResult(left.value.args[0], *self.capsys.readouterr())


def install_drivers(folder: Path, code: str, **drivers: str) -> dict[str, str]:
    """Install a distribution ``kvferry-fake`` with drivers, the classes of a module with this code.

    Returns the environment of a process that finds it.
    """
    info = folder / "kvferry_fake-1.2.dist-info"
    info.mkdir()
    entries = "".join(f"{name} = fake_drivers:{driver}\n" for name, driver in drivers.items())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-fake\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[kvferry.drivers]\n{entries}")
    (folder / "fake_drivers.py").write_text(code)
    path = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}


def run_kvferry(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process, and return its result and output."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100.0,
    )
