"""Which libucp is taken, and what is said of it and of those that are not."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.core.errors import DriverError
from kvferry.drivers.ucx import dlopen as opening
from kvferry.drivers.ucx import library
from kvferry.drivers.ucx.library import find
from kvferry.drivers.ucx.ucp import Ucp
from tests.drivers.ucx import fakes

LOADS = """
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
    """Neither the system nor the environment of these tests has any, whatever it has."""
    monkeypatch.setattr(library, "SYSTEMS_OWN", "libucp_of_these_tests.so.0")
    monkeypatch.setattr(library, "WHEEL", "libucx_of_nobody")


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The wheel is installed."""
    monkeypatch.setattr(library, "WHEEL", "libucx")
    monkeypatch.setattr(library, "SYSTEMS_OWN", "libucp.so.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "no system"))
    monkeypatch.syspath_prepend(tmp_path)
    return fakes.wheel(tmp_path)


def systems(monkeypatch: pytest.MonkeyPatch, path: Path) -> Path:
    """Let this be the system's."""
    monkeypatch.setattr(library, "SYSTEMS_OWN", "libucp.so.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(path.parent))
    return path


def test_none() -> None:
    with pytest.raises(DriverError) as caught:
        find()
    said = str(caught.value)
    assert "libucp_of_these_tests.so.0: cannot open" in said
    assert "the wheel libucx is not installed" in said
    assert "pip install 'kvferry[ucx]'" in said
    assert "driver_options: library" in said


def test_one_that_is_not_there(tmp_path: Path) -> None:
    """The one that was named, or none: not another one instead."""
    path = str(tmp_path / "libucp.so.0")
    with pytest.raises(DriverError, match="driver_options of ucx: library: ") as caught:
        find(path)
    assert f"{path}: cannot open" in str(caught.value)


def test_one_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "libucp.so.0"
    path.write_text("a text")
    with pytest.raises(DriverError, match=r"file too short|invalid ELF header"):
        find(str(path))


def test_one_that_is_another_library() -> None:
    with pytest.raises(DriverError, match="undefined symbol: ucp_get_version"):
        find("libc.so.6")


def test_an_environment_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DriverError, match=r"could not be tried: .*/nowhere/python"):
        find("libc.so.6")


@fakes.NEEDS_COMPILER
def test_one_that_crashes(tmp_path: Path) -> None:
    """It does so in a process of its own."""
    path = fakes.ucp(tmp_path, (1, 22, 0), fakes.CRASHES)
    with pytest.raises(DriverError, match=r"the process that opened .* ended with status -"):
        find(str(path))


@fakes.NEEDS_COMPILER
@pytest.mark.parametrize(
    ("version", "why"),
    [
        ((1, 9, 0), "older than"),
        ((1, 20, 9), "older than"),
        ((2, 0, 0), "another major version"),
        ((0, 99, 0), "another"),
    ],
)
def test_one_of_another_version(tmp_path: Path, version: library.Version, why: str) -> None:
    path = fakes.ucp(tmp_path, version)
    with pytest.raises(DriverError) as caught:
        find(str(path))
    assert why in str(caught.value)
    assert library.dotted(version) in str(caught.value)
    assert str(path) in str(caught.value)


@fakes.NEEDS_COMPILER
def test_one_that_is_named(tmp_path: Path, wheel: Path) -> None:
    path = fakes.ucp(tmp_path / "mine", (1, 99, 3))
    found = find(str(path))
    assert (found.path, found.version, found.source) == (str(path), (1, 99, 3), "option")
    assert not found.rdma
    assert found.transports == ("self", "posix", "sysv", "tcp")
    assert found.advice == ""
    assert str(found) == f"UCX 1.99.3, without RDMA (option library: {path})"


@fakes.NEEDS_COMPILER
def test_rdma(tmp_path: Path) -> None:
    found = find(str(fakes.with_rdma(fakes.ucp(tmp_path, (1, 22, 0)))))
    assert found.rdma
    assert found.transports[-1] == "ib"
    assert "1.22.0, with RDMA" in str(found)


@fakes.NEEDS_COMPILER
def test_rdma_that_does_not_load(tmp_path: Path) -> None:
    """Where libibverbs is not installed, say."""
    path = fakes.with_rdma(fakes.ucp(tmp_path, (1, 22, 0)))
    (tmp_path / "ucx" / "libuct_ib.so.0").write_text("damaged")
    assert not find(str(path)).rdma


def test_the_wheel(wheel: Path) -> None:
    """Its files say what it is: it is neither imported nor opened."""
    found = find()
    assert (found.path, found.version, found.source) == (str(wheel), (1, 22, 0), "wheel")
    assert not found.rdma
    assert found.transports == ("self", "posix", "sysv", "tcp", "cma")


@pytest.mark.parametrize("text", ["1.9.0", "2.1.0"])
def test_a_wheel_of_another_version(wheel: Path, text: str) -> None:
    (wheel.parents[1] / "UCX_WHEEL_VERSION.txt").write_text(text)
    with pytest.raises(DriverError, match=text):
        find()


@fakes.NEEDS_COMPILER
def test_a_wheel_that_does_not_say_its_version(wheel: Path) -> None:
    (wheel.parents[1] / "UCX_WHEEL_VERSION.txt").unlink()
    fakes.ucp(wheel.parent, (1, 98, 0))
    assert find().version == (1, 98, 0)


def test_a_wheel_without_its_library(wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(DriverError, match=r"libucp.so.0: cannot open"):
        find()


@fakes.NEEDS_COMPILER
def test_the_systems_before_the_wheels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path
) -> None:
    path = systems(monkeypatch, fakes.ucp(tmp_path / "system", (1, 23, 0)))
    found = find()
    assert (found.path, found.source) == (str(path), "system")


@fakes.NEEDS_COMPILER
@pytest.mark.parametrize("version", [(1, 9, 0), (1, 18, 0), (1, 20, 9)])
def test_a_systems_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wheel: Path,
    caplog: pytest.LogCaptureFixture,
    version: library.Version,
) -> None:
    """The wheel's is taken; what is lost by that is said."""
    path = systems(monkeypatch, fakes.with_rdma(fakes.ucp(tmp_path / "system", version)))
    found = find()
    assert (found.path, found.source) == (str(wheel), "wheel")
    assert str(path) in found.advice
    assert f"to use RDMA, UCX {library.dotted(library.LOWEST)} or later" in found.advice
    assert [record.message for record in caplog.records] == [found.advice]


@fakes.NEEDS_COMPILER
@pytest.mark.parametrize(
    "version", [(0, 99, 0), (1, 20, 9), library.LOWEST, (1, 22, 0), (1, 99, 9), (2, 0, 0)]
)
def test_what_is_found_is_what_the_binding_takes(tmp_path: Path, version: library.Version) -> None:
    """A version that ``find`` takes must not be refused once it is loaded."""
    path = fakes.ucp(tmp_path, version)
    try:
        find(str(path))
        reason = "its build is not complete"  # it has no function but the one for its version
    except DriverError:
        reason = "is not one that is known"
    with pytest.raises(DriverError, match=reason):
        Ucp(ctypes.CDLL(str(path)))


@fakes.NEEDS_COMPILER
def test_another_one_can_do_rdma(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    able = systems(monkeypatch, fakes.with_rdma(fakes.ucp(tmp_path / "system", (1, 23, 0))))
    found = find(str(fakes.ucp(tmp_path / "mine", (1, 22, 0))))
    assert found.source == "option"
    assert found.advice.endswith(f"driver_options: library: {able}")
    assert [record.message for record in caplog.records] == [found.advice]


@fakes.NEEDS_COMPILER
def test_loads_with_its_neighbours_and_for_itself(tmp_path: Path) -> None:
    """Nobody else sees its symbols; and no library gets the neighbours of another one."""
    first = fakes.in_halves(tmp_path / "first", (1, 22, 0))
    second = fakes.in_halves(tmp_path / "second", (1, 22, 0))
    said = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADS, first, first, second],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said[:2] == ["True False", "True False"]
    assert f"another UCX already ({first.parent}" in said[2]
    assert str(second) in said[2]
    assert "driver_options: library" in said[2]


def test_one_that_has_vanished_meanwhile(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "loaded_elsewhere", lambda _: None)
    with pytest.raises(DriverError, match="does not load"):
        library.load(find())


@pytest.mark.ucx
def test_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = find()
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADS, found.path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "True False\n"
    assert found.version >= library.LOWEST
    assert find(found.path).version == found.version
