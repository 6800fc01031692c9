"""Hashes of LoRA adapters' files.

vLLM reads an adapter's configuration and its weights from a folder. The *version* of these files
shows every later change, so that they are hashed once per version.
"""

from __future__ import annotations

import hashlib
import stat
import time
from pathlib import Path

from kvferry.core.errors import KVFerryError
from kvferry.core.lru_cache import LRUCache

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

AdapterVersion = tuple[tuple[str, int, int, int, int], ...]
"""For configuration and weights: name, inode, size in bytes, mtime and ctime in nanoseconds.

Programs can set mtime to any value, but not ctime. There is no device number, because hosts number
the same network file system differently.
"""


class AdapterError(KVFerryError):
    """An adapter's content is not known, or is not what the engine loaded."""


def adapter_version(path: str) -> AdapterVersion:
    """Return the current version of the files in an adapter's folder, or ``AdapterError``."""
    try:
        folder = Path(path).expanduser()
        weights = next((name for name in WEIGHTS if (folder / name).is_file()), WEIGHTS[0])
        return tuple(_file_version(folder, name) for name in (CONFIG, weights))
    except (OSError, ValueError, RuntimeError) as exc:
        raise AdapterError(
            f"its files in {path[:200]!r} cannot be read ({exc}): load the adapter from a folder "
            f"with {CONFIG} and {WEIGHTS[0]}, and leave the folder in place"
        ) from exc


class AdapterContents:
    """The contents of adapters' files, as hashes. Safe to use from any thread."""

    def __init__(self) -> None:
        # By path, too: in two folders, files may have the same version, because it has no device
        # number, and images of file systems often repeat inodes and times.
        self._contents = LRUCache[bytes](MAX_VERSIONS)

    def known(self, path: str) -> bytes | None:
        """Return the content of the files as they are now; ``None`` if they were not hashed.

        Raises:
            AdapterError: A file is missing or cannot be read.
        """
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


def _settled_version(path: str) -> AdapterVersion:
    """Return the version of files that have not changed for ``SETTLE_SECONDS``."""
    version = adapter_version(path)
    if time.time() - max(changed for *_, changed in version) / 1e9 < SETTLE_SECONDS:
        time.sleep(SETTLE_SECONDS)
        if adapter_version(path) != version:
            raise AdapterError(
                f"its files in {path[:200]!r} keep changing: load it when they are complete"
            )
    return version


def _hash(path: str, version: AdapterVersion) -> bytes:
    """Return the content of files of a version."""
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


def _file_version(folder: Path, name: str) -> tuple[str, int, int, int, int]:
    found = (folder / name).stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{name} is not an ordinary file")
    return name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
