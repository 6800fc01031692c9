"""``make pythons``: how interpreters are found, and which outcomes are a success."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import pythons

OWN = f"{sys.version_info.major}.{sys.version_info.minor}"


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_on_the_path_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = write_script(tmp_path / f"python{OWN}", f'exec {sys.executable} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert pythons.find_interpreter(OWN) == found


def test_a_pyenv_shim_that_does_not_start_is_replaced_by_pyenvs_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path / f"python{OWN}", "exit 127")
    own = write_script(
        tmp_path / "versions" / "bin" / f"python{OWN}", f'exec {sys.executable} "$@"'
    )
    write_script(tmp_path / "pyenv", f"echo {tmp_path / 'versions'}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert pythons.find_interpreter(OWN) == own


def test_an_interpreter_of_another_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path / "python3.99", f'exec {sys.executable} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert pythons.find_interpreter("3.99") is None


def test_a_missing_version_is_reported_as_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pythons.main(["3.98", "3.99"]) == 1
    printed = capsys.readouterr().out
    for version in ("3.98", "3.99"):
        assert f"Python {version}: SKIPPED, since it is not on this machine: install it" in printed


@pytest.mark.parametrize(
    ("outcomes", "success"),
    [
        (["passed", "passed"], True),
        (["passed", "SKIPPED, since"], True),
        (["passed", "FAILED"], False),
        (["SKIPPED, since", "SKIPPED, since"], False),
    ],
)
def test_one_version_must_pass_and_none_may_fail(outcomes: list[str], success: bool) -> None:
    assert pythons.is_success(outcomes) is success
