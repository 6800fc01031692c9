"""A missing or broken NIXL is reported with its remedy."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from kvferry.core.errors import DriverError
from kvferry.drivers.nixl import library


def fail_imports(monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception]) -> None:
    """Make the import of each package raise its error."""

    def raised(name: str) -> ModuleType:
        raise errors[name.partition(".")[0]]

    monkeypatch.setattr(importlib, "import_module", raised)


def missing(package: str, needed: str = "") -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {needed or package!r}", name=needed or package)


def test_missing_library_is_reported_with_install_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_imports(monkeypatch, {package: missing(package) for package in library.PACKAGES})
    with pytest.raises(
        DriverError, match=r"not installed: pip install 'kvferry\[nixl\]'"
    ) as caught:
        library.load()
    assert "without torch, pip install --no-deps nixl-cu13" in str(caught.value)


def test_build_behind_an_older_meta_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Ray or Dynamo has installed ``nixl``, and an extra only a later build."""
    own = library.load()
    monkeypatch.setattr(importlib, "import_module", lambda name: own.api)
    assert str(library.load()) == str(own)
    assert library.PACKAGES[0] not in str(own).split()


def test_library_that_does_not_load_is_reported_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message does not suggest an installation, although other packages are missing."""
    fail_imports(
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
