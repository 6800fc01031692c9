"""Source distributions are fetched from pip's indexes, checked and unpacked once."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.next_version.sdist import SdistError, fetch

NOBODY = "http://127.0.0.1:9"
"""Where nothing listens."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""


def archive(name: str) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as opened:
        member = tarfile.TarInfo(name)
        member.size = 3
        opened.addfile(member, io.BytesIO(b"one"))
    return written.getvalue()


def publish(folder: Path, content: bytes, digest: str | None = None) -> None:
    page = folder / "some-thing"
    page.mkdir(parents=True)
    (folder / "some_thing-1.0.tar.gz").write_bytes(content)
    digest = digest or hashlib.sha256(content).hexdigest()
    links = f'<a>none</a><a href="../some_thing-1.0.tar.gz#sha256={digest}">it</a>'
    (page / "index.html").write_text(links)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The folder and the address of an index."""
    folder = tmp_path / "index"
    folder.mkdir()
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_was_downloaded_is_unpacked_and_kept(index: tuple[Path, str], tmp_path: Path) -> None:
    folder, address = index
    publish(folder, archive("some_thing-1.0/PKG-INFO"))
    kept = tmp_path / "kept"
    found = fetch("some_thing", "1.0", kept, [NOBODY, address])
    assert (found / "PKG-INFO").read_text() == "one"
    assert [path.name for path in kept.iterdir()] == ["some_thing-1.0"]
    assert fetch("some_thing", "1.0", kept, [NOBODY]) == found


@pytest.mark.parametrize(
    ("version", "digest", "words"),
    [
        ("2.0", None, r"some_thing-2\.0\.tar\.gz.*does not have it"),
        ("1.0", "0" * 64, "not the hash"),
    ],
)
def test_what_is_refused(
    index: tuple[Path, str], tmp_path: Path, version: str, digest: str | None, words: str
) -> None:
    folder, address = index
    publish(folder, archive("some_thing-1.0/PKG-INFO"), digest)
    with pytest.raises(SdistError, match=words):
        fetch("some_thing", version, tmp_path / "kept", [address])
    assert not (tmp_path / "kept" / f"some_thing-{version}").exists()
