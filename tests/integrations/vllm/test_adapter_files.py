"""Versions and hashes of an adapter's files. Needs no vLLM."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm import adapter_files
from kvferry.integrations.vllm.adapter_files import (
    CONFIG,
    WEIGHTS,
    AdapterError,
    AdapterHashes,
    adapter_version,
    hash_files,
    settled_version,
)
from tests.engines.steps import eventually


def write(folder: Path, weights: bytes = b"weights", config: str = "{}") -> str:
    """Write an adapter, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config)
    (folder / WEIGHTS[0]).write_bytes(weights)
    return str(folder)


def content(path: str) -> bytes:
    return hash_files(path)[1]


@pytest.fixture
def hashes() -> Iterator[AdapterHashes]:
    made = AdapterHashes()
    yield made
    made.close()
    made.close()


def finish(hashes: AdapterHashes, path: str) -> None:
    hashes.start(path)
    eventually(lambda: not hashes.in_progress(path))


def test_the_folder_does_not_matter(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one"), tmp_path / "other"
    shutil.copytree(one, other)
    (other / "README.md").write_text("vLLM does not read this file")
    assert content(one) == content(str(other))


@pytest.mark.parametrize(
    "changes", [{"weights": b"Weights"}, {"weights": b"weights "}, {"config": '{"r": 8}'}]
)
def test_each_file_matters(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert content(write(tmp_path / "one")) != content(write(tmp_path / "other", **changes))


def test_bytes_belong_to_one_file(tmp_path: Path) -> None:
    first = write(tmp_path / "first", weights=b"bc", config="a")
    second = write(tmp_path / "second", weights=b"c", config="ab")
    assert content(first) != content(second)


def test_the_file_that_vllm_reads_counts(tmp_path: Path) -> None:
    path = write(tmp_path, weights=b"old")
    (tmp_path / WEIGHTS[0]).rename(tmp_path / WEIGHTS[1])
    old = content(path)
    write(tmp_path, weights=b"new")
    assert content(path) != old


def test_a_version_shows_a_change_that_hides_its_time(tmp_path: Path) -> None:
    """Programs can set the time of modification back, but not the time of change."""
    path = write(tmp_path)
    before = settled_version(path)
    weights = tmp_path / WEIGHTS[0]
    times = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = adapter_version(path)
    assert before[1].modified == after[1].modified
    assert before != after


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS[0], ""])
def test_a_file_that_is_gone(tmp_path: Path, missing: str) -> None:
    path = write(tmp_path / "adapter")
    shutil.rmtree(path) if not missing else (Path(path) / missing).unlink()
    with pytest.raises(AdapterError, match=r"cannot be read .* leave the folder in place"):
        hash_files(path)


@pytest.mark.parametrize("path", ["somebody/adapter-on-a-hub", "with\0zero", "a" * 5000])
def test_paths_that_are_no_folder(path: str) -> None:
    with pytest.raises(AdapterError, match="cannot be read"):
        adapter_version(path)


def test_a_pipe_instead_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / CONFIG).unlink()
    os.mkfifo(tmp_path / CONFIG)
    with pytest.raises(AdapterError, match="not an ordinary file"):
        hash_files(path)


def test_files_that_change_while_they_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)

    def begin(digest_size: int) -> Any:
        (tmp_path / WEIGHTS[0]).write_bytes(b"changed")
        return hashlib.blake2b(digest_size=digest_size)

    monkeypatch.setattr(adapter_files, "hashlib", SimpleNamespace(blake2b=begin))
    with pytest.raises(AdapterError, match="changed while they were hashed"):
        hash_files(path)


def test_files_that_keep_changing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    monkeypatch.setattr(adapter_files, "MAX_ATTEMPTS", 3)
    writes = SimpleNamespace(sleep=lambda seconds: write(tmp_path), time=time.time)
    monkeypatch.setattr(adapter_files, "time", writes)
    monkeypatch.setattr(adapter_files, "SETTLE_SECONDS", 60.0)
    with pytest.raises(AdapterError, match="keep changing"):
        settled_version(path)


def test_hashes_are_made_once_for_a_version(tmp_path: Path, hashes: AdapterHashes) -> None:
    path = write(tmp_path)
    version = settled_version(path)
    assert hashes.known(path, version) is None
    finish(hashes, path)
    assert hashes.known(path, version) == content(path)
    assert hashes.failure(path) is None
    assert hashes.known(path, None) is None
    write(tmp_path, weights=b"others")
    assert hashes.known(path, adapter_version(path)) is None
    assert hashes.known(path, version) is not None


def test_two_folders_with_equal_versions(
    tmp_path: Path, hashes: AdapterHashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of two file systems may have the same inodes and times."""
    one, other = write(tmp_path / "one"), write(tmp_path / "other", weights=b"WEIGHTS")
    same = settled_version(one)
    monkeypatch.setattr(adapter_files, "adapter_version", lambda path: same)
    finish(hashes, one)
    assert hashes.known(other, same) is None
    finish(hashes, other)
    assert hashes.known(one, same) != hashes.known(other, same)


def test_hashing_does_not_hold_up_the_caller(
    tmp_path: Path, hashes: AdapterHashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gate = write(tmp_path), threading.Event()

    def wait(digest_size: int) -> Any:
        assert gate.wait(30)
        return hashlib.blake2b(digest_size=digest_size)

    monkeypatch.setattr(adapter_files, "hashlib", SimpleNamespace(blake2b=wait))
    hashes.start(path)
    hashes.start(path)
    assert hashes.in_progress(path)
    gate.set()
    eventually(lambda: not hashes.in_progress(path))
    assert hashes.known(path, adapter_version(path)) is not None


def test_an_adapter_that_cannot_be_hashed(
    tmp_path: Path,
    hashes: AdapterHashes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone, path = str(tmp_path / "gone"), write(tmp_path / "there")
    finish(hashes, gone)
    assert "cannot be read" in (hashes.failure(gone) or "")
    with monkeypatch.context() as patched:
        patched.setattr(adapter_files, "hashlib", None)
        finish(hashes, path)
    assert "the log has the error" in (hashes.failure(path) or "")
    assert "could not be hashed" in caplog.text
    finish(hashes, path)
    assert hashes.known(path, adapter_version(path)) is not None
