"""Fetch the source distribution of a package without building it.

pip builds a package to learn its metadata, which vLLM's source does not survive without CUDA. So
only the indexes that pip is configured for are used, not pip's download.
"""

from __future__ import annotations

import fcntl
import hashlib
import html
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import warnings
from pathlib import Path


class SdistError(Exception):
    """There is no such source distribution, or it is not what its index says."""


def fetch(name: str, version: str, folder: Path, indexes: list[str] | None = None) -> Path:
    """Return the unpacked source distribution of a version; download it if it is not there.

    Another process that fetches into the same folder is waited for.
    """
    unpacked = folder / f"{name}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not (unpacked / "PKG-INFO").is_file():
            link = _link(name, version, configured_indexes() if indexes is None else indexes)
            _unpack(_download(link), unpacked)
    finally:
        os.close(descriptor)
    return unpacked


def _unpack(archive: bytes, unpacked: Path) -> None:
    """Unpack the folder of this name in an archive."""
    partial = unpacked.with_name(f".{unpacked.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            opened.extractall(partial, filter="data")
    except tarfile.TarError as exc:
        raise SdistError(f"{unpacked.name} was not unpacked: {exc}") from exc
    shutil.rmtree(unpacked, ignore_errors=True)
    (partial / unpacked.name).rename(unpacked)
    shutil.rmtree(partial)


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
    wanted, problems = f"{name}-{version}.tar.gz", []
    for index in indexes:
        page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/"
        try:
            with urllib.request.urlopen(page, timeout=60) as answer:
                links = re.findall(r"""<a\s[^>]*href=["']([^"']+)""", answer.read().decode())
        except OSError as exc:
            problems.append(f"an index did not answer: {exc}")
            continue
        for link in map(html.unescape, links):
            if urllib.parse.unquote(urllib.parse.urlsplit(link).path).endswith(f"/{wanted}"):
                return urllib.parse.urljoin(page, link)
        problems.append("an index does not have it")
    raise SdistError(f"no source distribution {wanted}: {'; '.join(problems)}")


def _download(link: str) -> bytes:
    """Return the file that a link leads to."""
    address, _, fragment = link.partition("#")
    name = address.rpartition("/")[2]  # the rest may have a password
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            data: bytes = answer.read()
    except OSError as exc:
        raise SdistError(f"{name} was not downloaded: {exc}") from exc
    algorithm, _, expected = fragment.partition("=")
    if algorithm == "sha256" and hashlib.sha256(data).hexdigest() != expected:
        raise SdistError(f"{name} has not the hash that the index says")
    return data
