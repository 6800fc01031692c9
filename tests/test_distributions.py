"""Problems that ``make build`` finds in an sdist and a wheel."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.distributions import METADATA, sdist_problems, wheel_problems

TRACKED = {
    ".github/workflows/tests.yml",
    "README.md",
    "benchmarks/request.py",
    "benchmarks/results/release.json",
    "kvferry/__init__.py",
    "kvferry/py.typed",
}
IN_SDIST = {
    "PKG-INFO",
    "README.md",
    "benchmarks/request.py",
    "kvferry/__init__.py",
    "kvferry/py.typed",
}
IN_WHEEL = {"kvferry/__init__.py", "kvferry/py.typed"} | {
    f"kvferry-1.0.dist-info/{name}" for name in METADATA
}


def write_sdist(folder: Path, names: set[str], link: str = "") -> Path:
    """Write an sdist with these files, one of them a link."""
    path, file, target = folder / "kvferry-1.0.tar.gz", folder / "empty", folder / "link"
    file.touch()
    target.symlink_to(file)
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.add(target if name == link else file, f"kvferry-1.0/{name}")
    return path


def write_wheel(folder: Path, names: set[str]) -> Path:
    path = folder / "kvferry-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


UNWANTED = {"benchmarks/results/release.json", "tests/.cache/core.123", "kvferry/a.pyc"}


@pytest.mark.parametrize(
    ("names", "link", "problems"),
    [
        (IN_SDIST, "", set()),
        (IN_SDIST | UNWANTED, "", {f"has {n}, which does not belong there" for n in UNWANTED}),
        (IN_SDIST - {"kvferry/py.typed"}, "", {"lacks kvferry/py.typed"}),
        (IN_SDIST, "README.md", {"kvferry-1.0/README.md is no plain file"}),
    ],
)
def test_problems_of_an_sdist(
    tmp_path: Path, names: set[str], link: str, problems: set[str]
) -> None:
    said = {f"kvferry-1.0.tar.gz{':' * bool(link)} {problem}" for problem in problems}
    assert set(sdist_problems(write_sdist(tmp_path, names, link), TRACKED)) == said


@pytest.mark.parametrize(
    ("names", "problems"),
    [
        (IN_WHEEL, []),
        (
            IN_WHEEL - {"kvferry/py.typed"} | {"tests/__init__.py"},
            [
                "kvferry-1.0-py3-none-any.whl has tests/__init__.py, which does not belong there",
                "kvferry-1.0-py3-none-any.whl lacks kvferry/py.typed",
            ],
        ),
    ],
)
def test_problems_of_a_wheel(tmp_path: Path, names: set[str], problems: list[str]) -> None:
    assert list(wheel_problems(write_wheel(tmp_path, names), TRACKED)) == problems
