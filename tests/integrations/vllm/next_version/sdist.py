"""Fetch the source distribution of a package without building it.

pip builds a package to learn its metadata, which vLLM's source does not survive without CUDA. So
only the indexes that pip is configured for are used, not pip's download.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 1 << 20


class SdistError(Exception):
    """There is no such source distribution, or it is not what its index says."""


def fetch(name: str, version: str, folder: Path, indexes: list[str] | None = None) -> Path:
    """Return the unpacked source distribution of a version; download it if it is not there."""
    unpacked = folder / f"{name}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if not (unpacked / "PKG-INFO").is_file():
            _fetch(name, version, folder, configured_indexes() if indexes is None else indexes)
    return unpacked


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; wait while another process has it locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fetch(name: str, version: str, folder: Path, indexes: list[str]) -> None:
    """Download and unpack the source distribution of a version."""
    archive = folder / f"{name}-{version}.tar.gz"
    _download(_link(name, version, indexes), archive)
    partial = folder / f".{name}-{version}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with tarfile.open(archive) as opened:
            opened.extractall(partial, filter="data")
    except tarfile.TarError as exc:
        raise SdistError(f"{archive.name} was not unpacked: {exc}") from exc
    unpacked = folder / f"{name}-{version}"
    shutil.rmtree(unpacked, ignore_errors=True)
    (partial / f"{name}-{version}").rename(unpacked)
    shutil.rmtree(partial)
    archive.unlink()


def configured_indexes() -> list[str]:
    """Return the addresses of the package indexes that pip uses here."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    said = dict(re.findall(r"^(?:global|install|download)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    first = os.environ.get("PIP_INDEX_URL") or said.get("index-url") or _default_index()
    others = os.environ.get("PIP_EXTRA_INDEX_URL") or said.get("extra-index-url", "")
    return [first.strip(), *others.replace("\\n", " ").split()]


def _default_index() -> str:
    """Return the index that pip uses where none is configured."""
    with warnings.catch_warnings(action="ignore"):  # of setuptools, if others imported distutils
        from pip._internal.models.index import PyPI  # type: ignore[import-untyped, unused-ignore]

    return str(PyPI.simple_url)


def _link(name: str, version: str, indexes: list[str]) -> str:
    """Return the address of a source distribution, with the hash behind ``#`` if there is one."""
    wanted = f"{name}-{version}.tar.gz"
    problems = []
    for index in indexes:
        page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/"
        try:
            found = next((link for link in _links(page) if _file_of(link) == wanted), None)
        except urllib.error.URLError as exc:
            problems.append(f"an index did not answer: {exc.reason}")
            continue
        if found is not None:
            return urllib.parse.urljoin(page, found)
        problems.append("an index does not have it")
    raise SdistError(f"no source distribution {wanted}: {'; '.join(problems) or 'no index is set'}")


def _links(page: str) -> list[str]:
    with urllib.request.urlopen(page, timeout=60) as answer:
        text = answer.read().decode()
    return [html.unescape(link) for link in re.findall(r"""<a\s[^>]*href=["']([^"']+)""", text)]


def _file_of(link: str) -> str:
    """Return the name of the file that a link leads to."""
    return urllib.parse.unquote(urllib.parse.urlsplit(link).path.rpartition("/")[2])


def _download(link: str, archive: Path) -> None:
    address, _, fragment = link.partition("#")
    digest = hashlib.sha256()
    try:
        with (
            urllib.request.urlopen(address, timeout=60) as answer,
            archive.open("wb") as out,
        ):
            while block := answer.read(CHUNK_BYTES):
                digest.update(block)
                out.write(block)
    except OSError as exc:
        raise SdistError(f"{archive.name} was not downloaded: {exc}") from exc
    algorithm, _, expected = fragment.partition("=")
    if algorithm == "sha256" and digest.hexdigest() != expected:
        archive.unlink()
        raise SdistError(f"{archive.name} has not the hash that the index says")
