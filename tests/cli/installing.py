"""Drivers of somebody else, installed for one test."""

from __future__ import annotations

import os
from pathlib import Path

import kvferry

ROOT = Path(kvferry.__file__).parents[1]


def install(folder: Path, code: str, **drivers: str) -> dict[str, str]:
    """Put a distribution ``kvferry-fake`` into a folder; the environment in which it is found.

    Args:
        folder: of the test.
        code: of its only module, ``fake_drivers``.
        drivers: name to class.
    """
    info = folder / "kvferry_fake-1.2.dist-info"
    info.mkdir()
    entries = "".join(f"{name} = fake_drivers:{driver}\n" for name, driver in drivers.items())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-fake\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[kvferry.drivers]\n{entries}")
    (folder / "fake_drivers.py").write_text(code)
    path = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
