"""Problems that ``make build`` finds in an sdist and a wheel."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from tests.distributions import METADATA, sdist_problems, wheel_problems

TRACKED = {
    ".github/workflows/tests.yml",
    "README.md",
    "benchmarks/request.py",
    "benchmarks/results/bench.json",
    "docs/plots/one.svg",
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


def sdist(folder: Path, names: set[str]) -> Path:
    path, file = folder / "kvferry-1.0.tar.gz", folder / "empty"
    file.touch()
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.add(file, f"kvferry-1.0/{name}")
    return path


def wheel(folder: Path, names: set[str]) -> Path:
    path = folder / "kvferry-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def test_a_correct_sdist_has_no_problems(tmp_path: Path) -> None:
    assert list(sdist_problems(sdist(tmp_path, IN_SDIST), TRACKED)) == []


def test_caches_and_results_are_found_in_an_sdist(tmp_path: Path) -> None:
    unwanted = {"benchmarks/results/bench.json", "tests/.cache/core.123", "kvferry/a.pyc"}
    found = set(sdist_problems(sdist(tmp_path, IN_SDIST | unwanted), TRACKED))
    assert found == {f"kvferry-1.0.tar.gz has {n}, which does not belong there" for n in unwanted}


def test_a_missing_file_of_an_sdist_is_named(tmp_path: Path) -> None:
    found = list(sdist_problems(sdist(tmp_path, IN_SDIST - {"kvferry/py.typed"}), TRACKED))
    assert found == ["kvferry-1.0.tar.gz lacks kvferry/py.typed"]


def test_a_link_in_an_sdist_is_found(tmp_path: Path) -> None:
    path = sdist(tmp_path, IN_SDIST - {"README.md"})
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with tarfile.open(path, "w:gz") as archive:
        for name in IN_SDIST:
            source = "link" if name == "README.md" else "empty"
            archive.add(tmp_path / source, f"kvferry-1.0/{name}")
    found = list(sdist_problems(path, TRACKED))
    assert found == ["kvferry-1.0.tar.gz: kvferry-1.0/README.md is no plain file"]


def test_a_correct_wheel_has_no_problems(tmp_path: Path) -> None:
    assert list(wheel_problems(wheel(tmp_path, IN_WHEEL), TRACKED)) == []


def test_a_wheel_with_tests_and_without_types(tmp_path: Path) -> None:
    names = IN_WHEEL - {"kvferry/py.typed"} | {"tests/__init__.py"}
    assert list(wheel_problems(wheel(tmp_path, names), TRACKED)) == [
        "kvferry-1.0-py3-none-any.whl has tests/__init__.py, which does not belong there",
        "kvferry-1.0-py3-none-any.whl lacks kvferry/py.typed",
    ]
