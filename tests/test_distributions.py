"""Problems that ``make build`` finds in an sdist and a wheel."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from tests.distributions import METADATA, sdist_problems, wheel_problems

TRACKED = {
    ".github/workflows/tests.yml",
    "README.md",
    "benchmarks/results/release.json",
    "kvferry/__init__.py",
    "kvferry/py.typed",
}
IN_SDIST = {"PKG-INFO", "README.md", "kvferry/__init__.py", "kvferry/py.typed"}
IN_WHEEL = {"kvferry/__init__.py", "kvferry/py.typed"} | {
    f"kvferry-1.0.dist-info/{name}" for name in METADATA
}


def in_sdist(folder: Path, names: set[str], link: str = "") -> set[str]:
    """Return the problems of an sdist with these files, one of them a link."""
    path, file, target = folder / "kvferry-1.0.tar.gz", folder / "empty", folder / "link"
    file.touch()
    target.unlink(missing_ok=True)
    target.symlink_to(file)
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.add(target if name == link else file, f"kvferry-1.0/{name}")
    return {each.removeprefix(path.name) for each in sdist_problems(path, TRACKED)}


def in_wheel(folder: Path, names: set[str]) -> set[str]:
    path = folder / "kvferry-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return {each.removeprefix(path.name) for each in wheel_problems(path, TRACKED)}


def test_problems_of_an_sdist(tmp_path: Path) -> None:
    unwanted = {"benchmarks/results/release.json", "tests/.cache/core.123", "kvferry/a.pyc"}
    assert in_sdist(tmp_path, IN_SDIST) == set()
    said = {f" has {name}, which does not belong there" for name in unwanted}
    assert in_sdist(tmp_path, IN_SDIST | unwanted) == said
    assert in_sdist(tmp_path, IN_SDIST - {"README.md"}) == {" lacks README.md"}
    assert in_sdist(tmp_path, IN_SDIST, "README.md") == {": kvferry-1.0/README.md is no plain file"}


def test_problems_of_a_wheel(tmp_path: Path) -> None:
    assert in_wheel(tmp_path, IN_WHEEL) == set()
    assert in_wheel(tmp_path, IN_WHEEL - {"kvferry/py.typed"} | {"tests/a.py"}) == {
        " has tests/a.py, which does not belong there",
        " lacks kvferry/py.typed",
    }
