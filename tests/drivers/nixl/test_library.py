"""Where NIXL is missing or broken, it is said what to do."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

import pytest

from kvferry.core.errors import DriverError
from kvferry.drivers.nixl import library


def importing(monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception]) -> None:
    """Let the import of each package raise."""

    def raised(name: str) -> ModuleType:
        raise errors[name.partition(".")[0]]

    monkeypatch.setattr(importlib, "import_module", raised)


def missing(package: str, needed: str = "") -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {needed or package!r}", name=needed or package)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    importing(monkeypatch, {package: missing(package) for package in library.PACKAGES})
    with pytest.raises(DriverError, match=r"not installed: pip install 'kvferry\[nixl\]'"):
        library.load()


def test_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is that of the library, not that other packages are missing, too."""
    importing(
        monkeypatch,
        {
            "nixl": missing("nixl"),
            "nixl_cu12": ImportError("libcudart.so.12: cannot open shared object file"),
            "nixl_cu13": missing("nixl_cu13", "torch"),
        },
    )
    with pytest.raises(DriverError) as caught:
        library.load()
    assert "nixl_cu12: libcudart.so.12" in str(caught.value)
    assert "nixl_cu13: No module named 'torch'" in str(caught.value)
    assert "pip install" not in str(caught.value)


class Config:
    """NIXL's, which its Python API makes and fills in."""

    pthrDelay = 0


def test_a_progress_thread_that_sleeps_is_asked_for_and_nothing_else_is_changed() -> None:
    made: list[tuple[str, int]] = []
    native = SimpleNamespace(
        nixlAgent=lambda name, config: made.append((name, config.pthrDelay)), other="as it is"
    )
    api = SimpleNamespace(nixlBind=native)
    found = library.NixlLibrary(
        package="nixl", version="0", api=api, errors=(), lost=OSError, unknown=KeyError
    )
    with found.patient(3):
        assert api.nixlBind.other == "as it is"
        api.nixlBind.nixlAgent("ours", Config())
    api.nixlBind.nixlAgent("another's", Config())
    assert made == [("ours", 3000), ("another's", 0)]
    assert api.nixlBind is native
