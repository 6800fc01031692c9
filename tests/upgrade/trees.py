"""Two trees of kvferry in one environment: an older commit in a folder of its own, and this one."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class TreeError(Exception):
    """There is no such tree; says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The code of one commit, as if it were installed."""

    name: str
    root: Path
    folder: Path  # for metadata and what processes write

    @property
    def path(self) -> str:
        """The ``PYTHONPATH`` of a process that runs kvferry as it is here, and tests as of now.

        The metadata are found before those of the distribution that is installed.
        """
        return os.pathsep.join(str(self.folder / name) for name in ("metadata", "code"))


def tree(name: str, folder: Path, commit: str = "") -> Tree:
    """Make the code of a commit, or of this tree, ready to run."""
    made = Tree(
        name=name, root=_unpacked(commit, folder / "tree") if commit else ROOT, folder=folder
    )
    project = tomllib.loads((made.root / "pyproject.toml").read_text("utf-8"))["project"]
    write_metadata(project, folder / "metadata")
    (folder / "code").mkdir()
    for package, root in (("kvferry", made.root), ("tests", ROOT), ("examples", ROOT)):
        (folder / "code" / package).symlink_to(root / package)
    return made


def _unpacked(commit: str, folder: Path) -> Path:
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", f"{commit}^{{commit}}"],
        capture_output=True,
        check=False,
    )
    if packed.returncode:
        raise TreeError(f"FROM={commit} is no commit of {ROOT}: name one, or fetch its history")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def write_metadata(project: Mapping[str, Any], folder: Path) -> None:
    """Write a distribution's metadata: drivers and vLLM's plugins are found by its entry points."""
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, "utf-8")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
