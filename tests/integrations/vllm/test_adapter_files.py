"""Hashes of an adapter's files. Needs no vLLM."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm import adapter_files
from kvferry.integrations.vllm.adapter_files import (
    CONFIG,
    WEIGHTS,
    AdapterContents,
    AdapterError,
    adapter_version,
)


def write(folder: Path, weights: bytes = b"weights", config: str = "{}") -> str:
    """Write an adapter, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config)
    (folder / WEIGHTS[0]).write_bytes(weights)
    return str(folder)


def content(path: str) -> bytes:
    return AdapterContents().read(path)[1]


def test_the_folder_does_not_matter(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), tmp_path / "other"
    shutil.copytree(one, other)
    (other / "README.md").write_text("vLLM does not read this file")
    assert content(one) == content(str(other))


@pytest.mark.parametrize(
    "changes",
    [{"weights": b"Weights"}, {"config": '{"r": 8}'}, {"weights": b"eights", "config": "{}w"}],
)
def test_each_file_matters(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert content(write(tmp_path / "one")) != content(write(tmp_path / "other", **changes))


def test_the_file_that_vllm_reads_counts(tmp_path: Path) -> None:
    path = write(tmp_path, weights=b"old")
    (tmp_path / WEIGHTS[0]).rename(tmp_path / WEIGHTS[1])
    old = content(path)
    write(tmp_path, weights=b"new")
    assert content(path) != old


def test_a_version_shows_a_change_that_hides_its_time(tmp_path: Path) -> None:
    """Programs can set the time of modification back, but not the time of change."""
    path, contents = write(tmp_path), AdapterContents()
    before, _ = contents.read(path)
    weights = tmp_path / WEIGHTS[0]
    times = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = adapter_version(path)
    assert [each[3] for each in before] == [each[3] for each in after]  # mtime
    assert before != after
    assert contents.known(path) is None


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS[0], ""])
def test_a_file_that_is_gone(tmp_path: Path, missing: str) -> None:
    path = write(tmp_path / "adapter")
    shutil.rmtree(path) if not missing else (Path(path) / missing).unlink()
    with pytest.raises(AdapterError, match=r"cannot be read .* leave the folder in place"):
        content(path)


@pytest.mark.parametrize("path", ["somebody/adapter-on-a-hub", "with\0zero", "a" * 5000])
def test_paths_that_are_no_folder(path: str) -> None:
    with pytest.raises(AdapterError, match="cannot be read"):
        adapter_version(path)


def test_a_pipe_instead_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / CONFIG).unlink()
    os.mkfifo(tmp_path / CONFIG)
    with pytest.raises(AdapterError, match="not an ordinary file"):
        content(path)


@pytest.mark.parametrize("gone", [False, True])
def test_files_that_change_while_they_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    path = write(tmp_path)

    def begin(digest_size: int) -> Any:
        weights = tmp_path / WEIGHTS[0]
        weights.unlink() if gone else weights.write_bytes(b"changed")
        return hashlib.blake2b(digest_size=digest_size)

    changing = SimpleNamespace(blake2b=begin, file_digest=hashlib.file_digest)
    monkeypatch.setattr(adapter_files, "hashlib", changing)
    words = "cannot be read" if gone else "changed while they were hashed"
    with pytest.raises(AdapterError, match=words):
        content(path)


def test_files_that_keep_changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hash, though the version may be the same: two changes may be at one time."""
    path = write(tmp_path)
    writes = SimpleNamespace(sleep=lambda seconds: write(tmp_path, b"more"), time=time.time)
    monkeypatch.setattr(adapter_files, "time", writes)
    monkeypatch.setattr(adapter_files, "SETTLE_SECONDS", 60.0)
    with pytest.raises(AdapterError, match="keep changing"):
        content(path)


def test_files_are_hashed_once_for_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, contents = write(tmp_path), AdapterContents()
    assert contents.known(path) is None
    version, first = contents.read(path)
    with monkeypatch.context() as patched:
        patched.setattr(adapter_files, "hashlib", None)
        assert contents.read(path) == (version, first)
    assert contents.known(path) == first
    write(tmp_path, weights=b"others")
    assert contents.known(path) is None
    assert contents.read(path)[1] != first


def test_two_folders_with_equal_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of two file systems may have the same inodes and times."""
    one, other = write(tmp_path / "one"), write(tmp_path / "other", weights=b"WEIGHTS")
    contents, same = AdapterContents(), AdapterContents().read(one)[0]
    monkeypatch.setattr(adapter_files, "adapter_version", lambda path: same)
    assert contents.read(one) != contents.read(other)


def test_a_content_that_another_process_found(tmp_path: Path) -> None:
    path, contents = write(tmp_path), AdapterContents()
    contents.learn(path, adapter_version(path), b"found")
    assert contents.known(path) == b"found"
