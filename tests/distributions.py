"""Check what is in the sdist and the wheel: ``python tests/distributions.py dist``.

The sdist has what git tracks, less what is needed neither to build nor to test: no cache, no result
of a run. The wheel has the package and its metadata. Needs git and the standard library.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LEFT_OUT = (".ci/", ".github/", ".pre-commit-config.yaml", "benchmarks/results/")
"""Tracked, and not in the sdist."""

METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
"""What a wheel has beside the package."""


def main(folder: Path) -> int:
    """Check the one sdist and the one wheel of a folder, and say what is wrong."""
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    found = [*sdist_problems(sdist, tracked()), *wheel_problems(wheel, tracked())]
    for problem in found:
        sys.stdout.write(f"{problem}\n")
    return int(bool(found))


def tracked() -> set[str]:
    """Return the paths of all files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.split("\0") if name}


def sdist_problems(path: Path, tracked: set[str]) -> Iterator[str]:
    """Yield what is wrong with an sdist's files, given those that git tracks."""
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    top = path.name.removesuffix(".tar.gz") + "/"
    yield from (f"{path.name}: {m.name} is no plain file" for m in members if not m.isfile())
    expected = {name for name in tracked if not name.startswith(LEFT_OUT)} | {"PKG-INFO"}
    yield from _differences(path, {m.name.removeprefix(top) for m in members}, expected)


def wheel_problems(path: Path, tracked: set[str]) -> Iterator[str]:
    """Yield what is wrong with a wheel's files, given those that git tracks."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    name, version, *_ = path.name.split("-")
    metadata = {f"{name}-{version}.dist-info/{each}" for each in METADATA}
    package = {each for each in tracked if each.startswith("kvferry/")}
    yield from _differences(path, names, package | metadata)


def _differences(path: Path, found: set[str], expected: set[str]) -> Iterator[str]:
    yield from (f"{path.name} has {name}, which does not belong there" for name in found - expected)
    yield from (f"{path.name} lacks {name}" for name in expected - found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
