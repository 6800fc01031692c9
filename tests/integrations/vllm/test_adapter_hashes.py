"""Hashes of adapters' files, and the loads that a worker sees and reports. Needs no vLLM."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm import adapter_hashes
from kvferry.integrations.vllm.adapter_hashes import (
    CONFIG,
    METHOD,
    UNKNOWN,
    WEIGHTS,
    AdapterContents,
    AdapterError,
    AdapterLoad,
    adapter_version,
    observe_loads,
)
from kvferry.integrations.vllm.config import ConfigError


def write(folder: Path, weights: bytes = b"weights", config: str = "{}") -> str:
    """Write an adapter, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(config)
    (folder / WEIGHTS[0]).write_bytes(weights)
    return str(folder)


def content(path: str) -> bytes:
    return AdapterContents().read(path)[1]


class TestFiles:
    @pytest.mark.parametrize(
        "changes",
        [{"weights": b"Weights"}, {"config": '{"r": 8}'}, {"weights": b"eights", "config": "{}w"}],
    )
    def test_each_file_matters(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        assert content(write(tmp_path / "one")) != content(write(tmp_path / "other", **changes))

    def test_the_file_that_vllm_reads_counts(self, tmp_path: Path) -> None:
        path = write(tmp_path, weights=b"old")
        (tmp_path / WEIGHTS[0]).rename(tmp_path / WEIGHTS[1])
        old = content(path)
        write(tmp_path, weights=b"new")
        assert content(path) != old

    def test_a_version_shows_a_change_that_hides_its_time(self, tmp_path: Path) -> None:
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

    @pytest.mark.parametrize(
        "path", ["somebody/adapter-on-a-hub", "with\0zero", "a" * 5000, CONFIG, WEIGHTS[0], "pipe"]
    )
    def test_what_is_no_folder_with_both_files(self, tmp_path: Path, path: str) -> None:
        if path in (CONFIG, WEIGHTS[0], "pipe"):
            folder = write(tmp_path)
            (tmp_path / (CONFIG if path == "pipe" else path)).unlink()
            if path == "pipe":
                os.mkfifo(tmp_path / CONFIG)
            path = folder
        with pytest.raises(AdapterError, match=r"cannot be read .* leave the folder in place"):
            content(path)

    @pytest.mark.parametrize("gone", [False, True])
    def test_files_that_change_while_they_are_hashed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
    ) -> None:
        path = write(tmp_path)

        def begin(digest_size: int) -> Any:
            weights = tmp_path / WEIGHTS[0]
            weights.unlink() if gone else weights.write_bytes(b"changed")
            return hashlib.blake2b(digest_size=digest_size)

        changing = SimpleNamespace(blake2b=begin, file_digest=hashlib.file_digest)
        monkeypatch.setattr(adapter_hashes, "hashlib", changing)
        words = "cannot be read" if gone else "changed while they were hashed"
        with pytest.raises(AdapterError, match=words):
            content(path)

    def test_files_that_keep_changing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No hash, though the version may be the same: two changes may be at one time."""
        path = write(tmp_path)
        writes = SimpleNamespace(sleep=lambda seconds: write(tmp_path, b"more"), time=time.time)
        monkeypatch.setattr(adapter_hashes, "time", writes)
        monkeypatch.setattr(adapter_hashes, "SETTLE_SECONDS", 60.0)
        with pytest.raises(AdapterError, match="keep changing"):
            content(path)

    def test_files_are_hashed_once_for_a_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, contents = write(tmp_path), AdapterContents()
        assert contents.known(path) is None
        version, first = contents.read(path)
        with monkeypatch.context() as patched:
            patched.setattr(adapter_hashes, "hashlib", None)
            assert contents.read(path) == (version, first)
        assert contents.known(path) == first
        write(tmp_path, weights=b"others")
        assert contents.known(path) is None
        contents.learn(path, adapter_version(path), b"found by another process")
        assert contents.known(path) == b"found by another process"

    def test_two_folders_with_equal_versions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Images of two file systems may have the same inodes and times."""
        one, other = write(tmp_path / "one"), write(tmp_path / "other", weights=b"WEIGHTS")
        contents, same = AdapterContents(), AdapterContents().read(one)[0]
        monkeypatch.setattr(adapter_hashes, "adapter_version", lambda path: same)
        assert contents.read(one) != contents.read(other)


class Worker:
    """A worker of vLLM, with its loads."""

    def __init__(self, manager: Any) -> None:
        config: Any = SimpleNamespace(
            lora_config=SimpleNamespace(), parallel_config=SimpleNamespace(rank=3)
        )
        self.loads = observe_loads(config)
        self._manager = manager(config.lora_config)

    def load(self, path: str, reads: Callable[[], object] = lambda: None) -> list[AdapterLoad]:
        """Load an adapter, during which ``reads`` is called; return what is reported of it."""
        lora = SimpleNamespace(lora_name="adapter", lora_int_id=1, lora_path=path, reads=reads)
        assert getattr(self._manager, METHOD)(lora) == "loaded"
        found = [*self.loads]
        self.loads.clear()
        return found


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's ``WorkerLoRAManager``."""

    class Manager:
        def __init__(self, config: Any) -> None:
            self.lora_config = config

        def _load_adapter(self, request: Any) -> str:
            request.reads()
            return "loaded"

    module = ModuleType("vllm.lora.worker_manager")
    vars(module)["WorkerLoRAManager"] = Manager
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Manager


class TestLoads:
    def test_a_load_is_reported_once_by_its_own_engine(self, manager: Any, tmp_path: Path) -> None:
        """Two engines may live in one process."""
        path, worker, other = write(tmp_path), Worker(manager), Worker(manager)
        [load] = worker.load(path)
        assert (load.rank, load.adapter, load.name, load.path) == (3, 1, "adapter", path)
        assert (load.version, load.content) == (adapter_version(path), content(path))
        assert not worker.loads
        assert not other.loads

    def test_files_that_change_during_a_load(self, manager: Any, tmp_path: Path) -> None:
        """Nor is it known what vLLM read if it loads by a name on a hub."""
        worker = Worker(manager)
        [changed] = worker.load(write(tmp_path), lambda: write(tmp_path, b"others"))
        [from_hub] = worker.load("somebody/adapter")
        assert changed.content == from_hub.content == UNKNOWN

    def test_a_load_that_fails(self, manager: Any, tmp_path: Path) -> None:
        """vLLM keeps the adapter that it had."""
        worker = Worker(manager)

        def fail() -> None:
            raise ValueError("LoRA rank 64 is greater than max_lora_rank")

        with pytest.raises(ValueError, match="max_lora_rank"):
            worker.load(write(tmp_path), fail)
        assert not worker.loads

    def test_a_vllm_that_loads_otherwise(self, manager: Any) -> None:
        delattr(manager, METHOD)
        with pytest.raises(ConfigError, match=r"start without enable_lora, or with vLLM 0\.29"):
            Worker(manager)
