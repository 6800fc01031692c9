"""The contents of LoRA adapters: hashes of their files, and what a worker of vLLM has loaded.

The *version* of an adapter's files shows every later change, so that they are hashed once per
version. vLLM has no hook for loads, so ``observe_loads`` wraps the method of vLLM that reads the
files. ADR 17 says why files alone do not tell what the engine computes with.
"""

from __future__ import annotations

import functools
import hashlib
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.core.errors import KVFerryError
from kvferry.core.lru_cache import LRUCache
from kvferry.integrations.vllm import versions
from kvferry.integrations.vllm.config import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The names of the file with the weights; vLLM reads the first that exists."""

CONTENT_BYTES = 32

SETTLE_SECONDS = 0.05
"""How long files must stay unchanged before their version is trusted.

File systems take times of change from a clock with steps of up to 10 ms, so two changes within one
step leave the same version.
"""

MAX_VERSIONS = 4096
"""How many hashes are kept; 100 bytes each."""

METHOD = "_load_adapter"
"""The method of vLLM's ``WorkerLoRAManager`` that reads an adapter's files, each time it does."""

UNKNOWN = b""
"""The content of files that could not be hashed, or changed while vLLM read them."""

AdapterVersion = tuple[tuple[str, int, int, int, int], ...]
"""For configuration and weights: name, inode, size in bytes, mtime and ctime in nanoseconds.

Programs can set mtime to any value, but not ctime. There is no device number, because hosts number
the same network file system differently.
"""

NOT_READ: tuple[AdapterVersion, bytes] = ((), UNKNOWN)


class AdapterError(KVFerryError):
    """An adapter's content is not known, or is not what the engine loaded."""


class AdapterContents:
    """The contents of adapters' files, as hashes. Safe to use from any thread."""

    def __init__(self) -> None:
        # By path, too: in two folders, files may have the same version, because it has no device
        # number, and images of file systems often repeat inodes and times.
        self._contents = LRUCache[bytes](MAX_VERSIONS)

    def known(self, path: str) -> bytes | None:
        """Return the content of the files as they are now; ``None`` if they were not hashed."""
        return self._contents.get((path, adapter_version(path)))

    def learn(self, path: str, version: AdapterVersion, content: bytes) -> None:
        """Remember a content that another process has found."""
        self._contents.put((path, version), content)

    def read(self, path: str) -> tuple[AdapterVersion, bytes]:
        """Return the version of the files as they are now, and their content, hashed if need be.

        Any later change changes the version. The content has ``CONTENT_BYTES`` bytes, which depend
        on the files' contents and names, but not on the folder.

        Raises:
            AdapterError: A file is missing, cannot be read, or changes meanwhile.
        """
        version = _settled_version(path)
        content = self._contents.get((path, version))
        if content is None:
            content = _hash(path, version)
            self._contents.put((path, version), content)
        return version, content


def adapter_version(path: str) -> AdapterVersion:
    """Return the version of the files in an adapter's folder, or ``AdapterError``."""
    try:
        folder = Path(path).expanduser()
        weights = next((name for name in WEIGHTS if (folder / name).is_file()), WEIGHTS[0])
        return tuple(_file_version(folder, name) for name in (CONFIG, weights))
    except (OSError, ValueError, RuntimeError) as exc:
        raise AdapterError(
            f"its files in {path[:200]!r} cannot be read ({exc}): load the adapter from a folder "
            f"with {CONFIG} and {WEIGHTS[0]}, and leave the folder in place"
        ) from exc


def _file_version(folder: Path, name: str) -> tuple[str, int, int, int, int]:
    found = (folder / name).stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{name} is not an ordinary file")
    return name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _settled_version(path: str) -> AdapterVersion:
    version = adapter_version(path)
    if time.time() - max(changed for *_, changed in version) / 1e9 < SETTLE_SECONDS:
        time.sleep(SETTLE_SECONDS)
        if adapter_version(path) != version:
            raise AdapterError(
                f"its files in {path[:200]!r} keep changing: load it when they are complete"
            )
    return version


def _hash(path: str, version: AdapterVersion) -> bytes:
    state = hashlib.blake2b(digest_size=CONTENT_BYTES)
    try:
        for name, _, size, *_ in version:
            state.update(f"{name} {size}\n".encode())
            with (Path(path).expanduser() / name).open("rb") as file:
                hashlib.file_digest(file, lambda: state)
    except OSError as exc:
        raise AdapterError(f"its files in {path[:200]!r} cannot be read ({exc})") from exc
    if adapter_version(path) != version:
        raise AdapterError(f"its files in {path[:200]!r} changed while they were hashed")
    return state.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLoad:
    """A load of an adapter from files, on one rank."""

    rank: int
    adapter: int  # the number under which vLLM keeps it (``lora_int_id``)
    name: str
    path: str  # the folder
    version: AdapterVersion = ()  # of the files that were read; empty if the content is unknown
    content: bytes = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """What ranks report about their adapters in a step."""

    loads: tuple[AdapterLoad, ...] = ()  # since the last reports, in order for each rank
    step: int = 0  # the step's number, if the scheduler half asked for a report

    def aggregate(self, other: AdapterReport) -> AdapterReport:
        """Return the reports of these and of other ranks on the same step, merged."""
        return AdapterReport(loads=self.loads + other.loads, step=min(self.step, other.step))


def observe_loads(vllm_config: VllmConfig) -> list[AdapterLoad]:
    """Return a list to which every later load of an adapter by this worker is added.

    Raises:
        ConfigError: This vLLM loads adapters in another way.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager

    loads, contents = list[AdapterLoad](), AdapterContents()
    rank = vllm_config.parallel_config.rank
    original: Callable[[WorkerLoRAManager, LoRARequest], LoRAModel] | None
    original = getattr(WorkerLoRAManager, METHOD, None)
    if original is None:
        raise ConfigError(
            f"this vLLM's WorkerLoRAManager has no {METHOD}, so the connector cannot see which "
            "files adapters were loaded from: start without enable_lora, or with vLLM "
            f"{versions.window()}"
        )

    @functools.wraps(original)
    def load_adapter(manager: WorkerLoRAManager, lora: LoRARequest) -> LoRAModel:
        # Several engines may live in one process; each has a lora_config of its own.
        if manager.lora_config is not vllm_config.lora_config:
            return original(manager, lora)
        before = _read(contents, lora.lora_path)
        loaded = original(manager, lora)
        # If the files are of the same version before and after it, vLLM has read what was hashed.
        version, content = before if before == _read(contents, lora.lora_path) else NOT_READ
        loads.append(
            AdapterLoad(
                rank=rank,
                adapter=lora.lora_int_id,
                name=lora.lora_name,
                path=lora.lora_path,
                version=version,
                content=content,
            )
        )
        return loaded

    setattr(WorkerLoRAManager, METHOD, load_adapter)
    return loads


def _read(contents: AdapterContents, path: str) -> tuple[AdapterVersion, bytes]:
    """Return the version and content of an adapter's files, or ``NOT_READ``."""
    try:
        return contents.read(path)
    except AdapterError:
        return NOT_READ
