"""Run the ``kvferry`` command in a process of its own, with drivers that a test installs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvferry

ROOT = Path(kvferry.__file__).parents[1]
COMMAND = [sys.executable, "-W", "error", "-c", "from kvferry.cli import main; main()"]


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


def run_kvferry(
    environment: dict[str, str],
    *arguments: str,
    timeout: float = 100.0,
    folder: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process, in a folder, and return its result and output."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
