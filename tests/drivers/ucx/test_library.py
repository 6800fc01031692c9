"""Which libucp is found, and how a missing or unusable one is reported."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.core.errors import DriverError
from kvferry.drivers.ucx import library
from kvferry.drivers.ucx.library import find
from kvferry.drivers.ucx.ucp import Ucp
from tests.drivers.ucx import fake_libraries

LOAD_SCRIPT = """
import ctypes, sys
from kvferry.core.errors import DriverError
from kvferry.drivers.ucx.library import find, load
for path in sys.argv[1:]:
    try:
        loaded = load(find(path))
        print(hasattr(loaded, "ucp_get_version"), hasattr(ctypes.CDLL(None), "ucp_get_version"))
    except DriverError as exc:
        print(exc)
"""


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide any libucp of the system and of the environment from the tests."""
    monkeypatch.setattr(library, "SYSTEMS_OWN", "libucp_of_these_tests.so.0")
    monkeypatch.setattr(library, "WHEEL", "libucx_of_nobody")


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The library of an installed wheel."""
    monkeypatch.setattr(library, "WHEEL", "libucx")
    monkeypatch.setattr(library, "SYSTEMS_OWN", "libucp.so.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "no system"))
    monkeypatch.syspath_prepend(tmp_path)
    return fake_libraries.wheel(tmp_path)


def test_no_library_is_reported_with_remedies() -> None:
    with pytest.raises(DriverError) as caught:
        find()
    for part in (
        "libucp_of_these_tests.so.0: cannot open",
        "the wheel libucx is not installed",
        "pip install 'kvferry[ucx]'",
        "driver_options: library",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/nowhere/libucp.so.0", "/nowhere/libucp.so.0: cannot open"),
        (__file__, "file too short|invalid ELF header"),
        ("libc.so.6", "undefined symbol: ucp_get_version"),
    ],
)
def test_named_file_that_is_not_ucx_is_refused(wheel: Path, path: str, why: str) -> None:
    """No other library is used in place of the named one."""
    with pytest.raises(DriverError, match=f"driver_options of ucx: library: .*({why})"):
        find(path)


@fake_libraries.NEEDS_COMPILER
@pytest.mark.parametrize(
    ("version", "why"),
    [
        ((0, 99, 0), "another"),
        ((1, 20, 9), "older than"),
        (library.LOWEST, ""),
        ((1, 99, 9), ""),
        ((2, 0, 0), "another major version"),
    ],
)
def test_versions_that_were_not_tested_are_refused(
    tmp_path: Path, version: library.Version, why: str
) -> None:
    path = fake_libraries.ucp(tmp_path, version)
    if why:
        with pytest.raises(DriverError, match=rf"{library.dotted(version)}.*{path}.*{why}"):
            find(str(path))
    else:
        found = find(str(path))
        assert (found.path, found.version, found.source) == (str(path), version, "option library")
        assert not found.rdma


def test_library_that_cannot_be_tried_or_loaded_is_refused(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find()

    def broken(path: str) -> ctypes.CDLL:
        raise OSError(f"{path}: cannot allocate memory in static TLS block")

    monkeypatch.setattr("kvferry.drivers.ucx.dlopen.opened", broken)
    with pytest.raises(DriverError, match=f"{wheel} does not load: .* static TLS block"):
        library.load(found)
    monkeypatch.setattr(library, "SECONDS", 0.0)
    with pytest.raises(DriverError, match=f"{wheel} could not be tried: .*timed out"):
        find(str(wheel))


@fake_libraries.NEEDS_COMPILER
def test_library_that_crashes_or_lacks_functions_is_refused(tmp_path: Path) -> None:
    """The library is tried in a process of its own."""
    crashes = fake_libraries.ucp(tmp_path / "one", (1, 22, 0), fake_libraries.CRASHING_CODE)
    with pytest.raises(DriverError, match=r"the process that opened .* ended with status -"):
        find(str(crashes))
    lacks = fake_libraries.ucp(tmp_path / "other", library.LOWEST)
    with pytest.raises(DriverError, match=r"undefined symbol: ucp_.*its build is not complete"):
        Ucp(ctypes.CDLL(str(lacks)))


@fake_libraries.NEEDS_COMPILER
def test_rdma_counts_only_where_its_module_loads(tmp_path: Path) -> None:
    """It does not load where libibverbs is not installed, for example."""
    path = fake_libraries.with_rdma(fake_libraries.ucp(tmp_path, (1, 22, 0)))
    assert "1.22.0, with RDMA" in str(find(str(path)))
    (tmp_path / "ucx" / "libuct_ib.so.0").write_text("damaged")
    assert "1.22.0, without RDMA" in str(find(str(path)))


def test_wheel_is_found_by_its_files(wheel: Path) -> None:
    """The wheel is neither imported nor opened."""
    found = find()
    assert (found.path, found.version, found.source) == (str(wheel), (1, 22, 0), "the wheel libucx")
    assert not found.rdma
    version = wheel.parents[1] / "UCX_WHEEL_VERSION.txt"
    version.write_text("new")  # it is opened after all
    with pytest.raises(DriverError, match=r"libucp.so.0: file too short"):
        find()
    version.write_text("1.22.0")
    wheel.unlink()
    with pytest.raises(DriverError, match=r"libucp.so.0: cannot open"):
        find()


@fake_libraries.NEEDS_COMPILER
@pytest.mark.parametrize(
    ("version", "source"), [((1, 23, 0), "the system's"), ((1, 18, 0), "the wheel libucx")]
)
def test_system_library_is_preferred_to_wheel_unless_it_is_too_old(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wheel: Path,
    version: library.Version,
    source: str,
) -> None:
    system = fake_libraries.ucp(tmp_path / "system", version)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(system.parent))
    assert find().source == source


@fake_libraries.NEEDS_COMPILER
def test_library_loads_its_own_dependencies_and_hides_its_symbols(tmp_path: Path) -> None:
    """No library is loaded with the dependencies of another one."""
    first = fake_libraries.with_dependency(tmp_path / "first", (1, 22, 0))
    second = fake_libraries.with_dependency(tmp_path / "second", (1, 22, 0))
    said = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD_SCRIPT, first, first, second],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said[:2] == ["True False", "True False"]
    assert f"another UCX already ({first.parent}" in said[2]
    assert str(second) in said[2]
    assert "driver_options: library" in said[2]
