"""Two trees of kvferry in one environment: an older commit in a folder of its own, and this one."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIDE = Path("tests/upgrade/side.py")


class TreeError(Exception):
    """There is no such tree; says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The code of one commit, as if it were installed."""

    name: str
    root: Path
    metadata: Path
    scratch: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a process that runs this code, whatever is installed."""
        return {
            **os.environ,
            "PYTHONPATH": f"{self.metadata}{os.pathsep}{self.root}",
            "TMPDIR": str(self.scratch),
            "XDG_CACHE_HOME": str(self.scratch),
        }


def this_tree(folder: Path) -> Tree:
    return prepared("new", ROOT, folder / "new")


def older_tree(commit: str, folder: Path) -> Tree:
    found = _commit(commit)
    root = folder / "old" / "tree"
    root.mkdir(parents=True)
    packed = _git("archive", "--format=tar", found)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(root, filter="data")
    return prepared("old", root, folder / "old")


def described(commit: str) -> str:
    return _git("show", "--no-patch", "--format=%h of %as, %s", commit).decode().strip()


def prepared(name: str, root: Path, folder: Path) -> Tree:
    """Make code that lies in a folder ready to run."""
    metadata, scratch = folder / "metadata", folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    _install(root, metadata)
    return Tree(name=name, root=root, metadata=metadata, scratch=scratch)


def _commit(name: str) -> str:
    try:
        found = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()
    except subprocess.CalledProcessError as exc:
        raise TreeError(
            f"FROM={name} is no commit of {ROOT}: name one, or fetch its history first"
        ) from exc
    return found


def _git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, check=True
    ).stdout


def _install(root: Path, metadata: Path) -> None:
    """Write a distribution's metadata: drivers and vLLM's plugins are found by its entry points.

    It is found before the distribution that is installed in this environment, and in its stead.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    folder = metadata / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", "utf-8"
    )
    groups = {"console_scripts": project.get("scripts", {})} | project.get("entry-points", {})
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines), "utf-8")
