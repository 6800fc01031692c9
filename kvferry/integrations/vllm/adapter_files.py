"""The files of LoRA adapters: which versions of them are on disk, and hashes of their contents.

vLLM reads an adapter's configuration and its weights from a folder. A *version* identifies the
files in the folder without reading them: two equal versions of one path stand for equal contents.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry.core.errors import KVFerryError
from kvferry.core.lru_cache import LRUCache

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The names of the file with the weights; vLLM reads the first that exists."""

CONTENT_BYTES = 32

SETTLE_SECONDS = 0.05
"""How long files must stay unchanged before their version is trusted.

File systems take times of change from a clock with steps of up to 10 ms, so two changes within one
step leave the same version.
"""

MAX_ATTEMPTS = 40
"""How often a version is read anew because the files have just changed."""

MAX_VERSIONS = 4096
"""How many hashes are kept; 100 bytes each."""

PIECE_BYTES = 1 << 20


class AdapterError(KVFerryError):
    """An adapter's content is not known, or is not what the engine loaded."""


class FileVersion(NamedTuple):
    """What changes if a file is written to or replaced.

    There is no device number, because hosts number the same network file system differently.

    Attributes:
        name: The name of the file in the adapter's folder.
        inode: The file's inode.
        size: In bytes.
        modified: Time of the last change of the content (mtime), in nanoseconds. Programs can set
            it to any value.
        changed: Time of the last change of content or inode (ctime), in nanoseconds. Programs
            cannot set it.
    """

    name: str
    inode: int
    size: int
    modified: int
    changed: int


AdapterVersion = tuple[FileVersion, ...]
"""The versions of the files that vLLM reads: configuration and weights."""


def adapter_version(path: str) -> AdapterVersion:
    """Return the current version of an adapter's files.

    Args:
        path: The adapter's folder, as vLLM got it.

    Raises:
        AdapterError: A file is missing or cannot be read.
    """
    folder = Path(path).expanduser()
    try:
        weights = next((name for name in WEIGHTS if (folder / name).is_file()), WEIGHTS[0])
        return tuple(_file_version(folder, name) for name in (CONFIG, weights))
    except (OSError, ValueError, RuntimeError) as exc:
        raise AdapterError(
            f"its files in {path[:200]!r} cannot be read ({exc}): load the adapter from a folder "
            f"with {CONFIG} and {WEIGHTS[0]}, and leave the folder in place"
        ) from exc


def settled_version(path: str) -> AdapterVersion:
    """Return the version of an adapter's files, once they have not changed for a short time.

    Any change after the call gives the files another version. Takes no time if the files last
    changed more than ``SETTLE_SECONDS`` ago.

    Args:
        path: The adapter's folder.

    Raises:
        AdapterError: A file is missing, cannot be read, or keeps changing.
    """
    version = adapter_version(path)
    for _ in range(MAX_ATTEMPTS):
        if time.time() - max(each.changed for each in version) / 1e9 >= SETTLE_SECONDS:
            return version
        time.sleep(SETTLE_SECONDS)
        before, version = version, adapter_version(path)
        if version == before:
            return version
    raise AdapterError(f"its files in {path[:200]!r} keep changing: load it when they are complete")


def hash_files(path: str) -> tuple[AdapterVersion, bytes]:
    """Return the version of an adapter's files, and a hash of the content of this version.

    Args:
        path: The adapter's folder.

    Returns:
        The version, and ``CONTENT_BYTES`` bytes that depend on the files' contents and names, but
        not on the folder.

    Raises:
        AdapterError: A file is missing, cannot be read, or changed meanwhile.
    """
    version = settled_version(path)
    state = hashlib.blake2b(digest_size=CONTENT_BYTES)
    try:
        for each in version:
            state.update(f"{each.name} {each.size}\n".encode())
            for piece in _pieces(Path(path).expanduser() / each.name):
                state.update(piece)
    except OSError as exc:
        raise AdapterError(f"its files in {path[:200]!r} cannot be read ({exc})") from exc
    if adapter_version(path) != version:
        raise AdapterError(f"its files in {path[:200]!r} changed while they were hashed")
    return version, state.digest()


class AdapterHashes:
    """Hash the files of adapters on a thread of its own, and remember the hashes.

    The thread starts with the first adapter. All methods may be called from one thread only.
    """

    def __init__(self) -> None:
        self._hashes = LRUCache[bytes](MAX_VERSIONS)
        self._failures = LRUCache[str](MAX_VERSIONS)
        self._in_progress: set[str] = set()
        self._paths: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def known(self, path: str, version: AdapterVersion | None) -> bytes | None:
        """Return the hash of a version's content; ``None`` if this version was not hashed.

        Args:
            path: The adapter's folder. Files in two folders may have the same version, because it
                has no device number: images of file systems often repeat inodes and times.
            version: The version of the files there.
        """
        return self._hashes.get((path, version))

    def failure(self, path: str) -> str | None:
        """Return why the last attempt to hash an adapter failed; ``None`` if it did not."""
        return self._failures.get(path)

    def in_progress(self, path: str) -> bool:
        """Return whether the files of an adapter are being hashed, or wait for that."""
        return path in self._in_progress

    def start(self, path: str) -> None:
        """Begin to hash the current version of an adapter's files; return at once.

        Args:
            path: The adapter's folder.
        """
        if path in self._in_progress:
            return
        self._in_progress.add(path)
        if self._thread is None:
            # A daemon: the process may end while a network file system does not answer.
            self._thread = threading.Thread(target=self._run, name="kvferry-adapters", daemon=True)
            self._thread.start()
        self._paths.put(path)

    def close(self) -> None:
        """Let the thread end after the adapter that it hashes. Calling it again has no effect."""
        self._paths.put(None)

    def _run(self) -> None:
        """Hash the queued adapters one after another, until ``close``."""
        while (path := self._paths.get()) is not None:
            try:
                version, content = hash_files(path)
            except AdapterError as exc:
                self._failures.put(path, str(exc))
            except Exception:  # a thread that ended would let every later request wait in vain
                logger.exception("the adapter in %r could not be hashed", path[:200])
                self._failures.put(path, "it could not be hashed; the log has the error")
            else:
                self._hashes.put((path, version), content)
            self._in_progress.discard(path)


def _file_version(folder: Path, name: str) -> FileVersion:
    """Return the version of one file.

    Raises:
        OSError: The file is missing, cannot be read, or is not an ordinary file.
    """
    found = (folder / name).stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{name} is not an ordinary file")
    return FileVersion(name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in pieces of at most ``PIECE_BYTES``."""
    # A pipe that has taken the file's place would otherwise never answer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
