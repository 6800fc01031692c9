"""The registry of drivers, with distributions made in a temporary folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import DriverError
from kvferry.core.transport.registry import DriverInfo, create, describe, installed, load

Install = Callable[..., None]

GOOD = """
from kvferry.core.transport import Transport
from kvferry.drivers.loopback import LoopbackTransport

class Good(LoopbackTransport):
    def __init__(self, colour: str = "red") -> None:
        super().__init__()
        self.colour = colour

class Entering(LoopbackTransport):
    interface_version = (2, 0)
    def __init__(self, *, enter, size: int = 1) -> None:
        super().__init__(enter=enter)

class Future(Good):
    interface_version = (3, 4)

class Vague(Good):
    interface_version = "one"

class Unlucky(Good):
    def __init__(self) -> None:
        raise OSError("no such device")

class Picky(Good):
    def __init__(self, *, device: str) -> None:
        super().__init__()

class Hollow(Good):
    @property
    def capabilities(self):
        raise RuntimeError("cannot say")

class Partial(Transport):
    def close(self) -> None: ...

def function() -> None: ...
"""
MODULES = {
    "fake_good": GOOD,
    "fake_needy": "import a_library_that_is_missing",
    "fake_broken": "raise RuntimeError('imported')",
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with one driver, which may be in one of ``MODULES``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    site = tmp_path / "site"
    site.mkdir()
    for module, source in MODULES.items():
        (site / f"{module}.py").write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(site))

    def one(name: str, value: str, distribution: str = "kvferry-fake") -> None:
        info = site / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n", encoding="utf-8"
        )
        table = info / "entry_points.txt"
        lines = table.read_text(encoding="utf-8") if table.exists() else "[kvferry.drivers]\n"
        table.write_text(f"{lines}{name} = {value}\n", encoding="utf-8")

    return one


def said_by(name: str, **options: object) -> str:
    with pytest.raises(DriverError) as caught:
        create(name, options)
    return str(caught.value)


def test_a_driver_is_created_with_its_options(install: Install) -> None:
    install("good", "fake_good:Good")
    for options, colour in (({"colour": "blue"}, "blue"), ({}, "red"), (None, "red")):
        transport = create("good", options)
        assert getattr(transport, "colour", None) == colour
        transport.close()


def test_only_the_named_driver_is_imported_also_one_installed_while_running(
    install: Install, tmp_path: Path
) -> None:
    install("broken", "fake_broken:Driver")
    info = DriverInfo(
        name="broken", distribution="kvferry-fake", version="1.2", entry_point="fake_broken:Driver"
    )
    assert installed()[0] == info
    assert "no driver 'good'" in said_by("good")
    install("good", "fake_good:Good")
    assert load("good").__name__ == "Good"
    install("late", "fake_good:Future")
    assert "3.4" in said_by("late")
    assert "fake_broken" not in sys.modules
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("driver", "options", "cause", "message"),
    [
        ("fake_needy:Driver", {}, ImportError, "a_library_that_is_missing.*install what it needs"),
        ("fake_good:Nothing", {}, AttributeError, "Nothing"),
        ("fake_good:Unlucky", {}, OSError, "does not start: OSError: no such device"),
        (
            "fake_good:Future",
            {},
            None,
            r"version 3\.4 of .* this kvferry has 2\.0: .* kvferry-fake",
        ),
        ("fake_good:Vague", {}, None, "interface_version 'one', not two numbers"),
        ("fake_good:function", {}, None, "not a subclass of kvferry.core.transport.Transport"),
        ("fake_good:Partial", {}, None, "lacks address, capabilities, connect"),
        ("fake_good:Good", {"color": "red"}, TypeError, "argument 'color'; .*takes: colour"),
        ("fake_good:Picky", {}, TypeError, "missing 1 required .* 'device'; .*takes: device"),
        ("fake_good:Entering", {"enter": 1}, TypeError, "argument 'enter'; .*takes: size"),
        (
            "kvferry.drivers.loopback:LoopbackTransport",
            {"threds": 3},
            None,
            "^driver_options of loopback: .* unknown field `threds`",
        ),
    ],
)
def test_a_driver_that_cannot_be_created_is_refused_with_the_reason(
    install: Install, driver: str, options: dict[str, object], cause: Any, message: str
) -> None:
    install("mine", driver)
    with pytest.raises(DriverError, match=message) as caught:
        create("mine", options)
    assert cause is None or isinstance(caught.value.__cause__, cause)


def test_an_unknown_name_is_refused_with_the_known_ones(install: Install) -> None:
    install("good", "fake_good:Good")
    said = said_by("goood")
    for part in ("'goood'", "good, loopback, nixl", "'kvferry.drivers'", "install"):
        assert part in said


def test_drivers_are_described_with_the_reason_if_they_do_not_work(install: Install) -> None:
    install("good", "fake_good:Good")
    install("hollow", "fake_good:Hollow")
    install("needy", "fake_needy:Driver")
    install("twin", "fake_broken:Driver", distribution="kvferry-one")
    install("twin", "fake_broken:Driver", distribution="kvferry-two")
    # Whether these two work depends on what else is installed; tests/drivers describes them.
    reports = [describe(info) for info in installed() if info.name not in ("nixl", "ucx")]
    twins = "kvferry-one 1.2 and kvferry-two 1.2: uninstall"
    expected = (
        ("good", "kvferry-fake", None),
        ("hollow", "kvferry-fake", "cannot say"),
        ("loopback", "kvferry", None),
        ("needy", "kvferry-fake", "a_library_that_is_missing"),
        ("twin", "kvferry-one", twins),
        ("twin", "kvferry-two", twins),
    )
    for report, (name, distribution, words) in zip(reports, expected, strict=True):
        assert (report.info.name, report.info.distribution) == (name, distribution)
        assert (report.capabilities is None) == (report.reason is not None) == (words is not None)
        assert words is None or words in str(report.reason)
    assert "fake_broken" not in sys.modules


def test_a_distribution_found_twice_is_one_driver(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("good", "fake_good:Good")
    again = tmp_path / "again"
    again.symlink_to(tmp_path / "site")
    monkeypatch.syspath_prepend(str(again))
    assert load("good").__name__ == "Good"
    assert [info.name for info in installed()].count("good") == 1
