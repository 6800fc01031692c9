"""``kvferry keygen`` writes private files and prints settings that work."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.side_channel.client import ping
from kvferry.core.side_channel.server import HandshakeServer
from kvferry.integrations.vllm.config import parse
from kvferry.integrations.vllm.security import SecuritySettings, read_security_settings
from tests.cli.command import Command
from tests.core.messages import encoded, payload

Keygen = Callable[..., str]


@pytest.fixture
def keygen(command: Command) -> Keygen:
    """A function that runs ``kvferry keygen``, and returns what it prints, on stderr too."""

    def run(folder: Path, *engines: str, status: int = 0) -> str:
        ran = command.run("keygen", str(folder), *(f"--engine={engine}" for engine in engines))
        assert ran.status == status, ran
        return ran.out + ran.err

    return run


def printed_settings(output: str) -> dict[str, SecuritySettings]:
    """Return the printed settings of each engine, as it reads them."""
    found = re.findall(r"Into kv_connector_extra_config of (\S+):\n(\{.*?\n\})", output, re.DOTALL)
    return {engine: read_security_settings(parse(json.loads(text))) for engine, text in found}


def test_printed_settings_work_and_files_are_private(keygen: Keygen, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    output = keygen(folder)
    settings = printed_settings(output)
    assert list(settings) == ["prefill", "decode"]
    prefill, decode = settings.values()
    assert prefill.exposed == decode.exposed == ()
    assert prefill.secrets == decode.secrets is not None
    with HandshakeServer(
        encoded(payload()), engine="prefill", incarnation=7, access=prefill.access
    ) as server:
        place, key = (server.host, server.port), prefill.access.public
        assert ping(*place, "prefill", timeout=60, access=decode.access, key=key) == 7
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    names = {f"{engine}.{kind}" for engine in settings for kind in ("secret", "public")}
    assert modes == dict.fromkeys(names | {"ticket.secret"}, 0o600)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secrets = [path.read_text().strip() for path in folder.glob("*.secret")]
    assert [secret for secret in secrets if secret in output] == []


def test_existing_files_are_not_overwritten(keygen: Keygen, tmp_path: Path) -> None:
    link = tmp_path / "prefill.secret"
    link.symlink_to(tmp_path / "elsewhere")
    assert "has prefill.secret already" in keygen(tmp_path, status=1)
    assert [*tmp_path.iterdir()] == [link]
    link.unlink()
    keygen(tmp_path)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    for engines in ((), ("decode",), ("other", "prefill")):
        assert "already, and nothing is overwritten" in keygen(tmp_path, *engines, status=1)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_added_engine_and_probe_know_the_others(keygen: Keygen, tmp_path: Path) -> None:
    keygen(tmp_path)
    secret = (tmp_path / "ticket.secret").read_text()
    output = keygen(tmp_path, "decode-2", "probe")
    assert "Kept ticket.secret" in output
    assert (tmp_path / "ticket.secret").read_text() == secret
    settings = printed_settings(output)
    assert list(settings) == ["decode-2"]
    peers = settings["decode-2"].access.peers
    assert len(peers) == 3
    assert (tmp_path / "probe.public").read_text().split()[-1] in {peer.hex() for peer in peers}
    assert f"--curve-secret-key=file:{tmp_path}/probe.secret" in output
    assert f"--curve-peer=file:{tmp_path}/ENGINE.public" in output


@pytest.mark.parametrize(
    "names", ["", "../x", "a/b", "ticket", ".hidden", "a" * 65, "a b", ("a", "a")]
)
def test_names_that_cannot_be_files_are_refused(
    keygen: Keygen, tmp_path: Path, names: str | tuple[str, ...]
) -> None:
    why = "cannot be the name of an engine's files" if isinstance(names, str) else "named twice"
    each = (names,) if isinstance(names, str) else names
    assert why in keygen(tmp_path / "keys", *each, status=1)
    assert not (tmp_path / "keys").exists()


def test_files_that_cannot_all_be_written_leave_nothing(
    keygen: Keygen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, done = os.fchmod, list[int]()

    def change_one(descriptor: int, mode: int) -> None:
        if done:
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(descriptor)
        change(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", change_one)
    assert "No space left on device" in keygen(tmp_path, status=1)
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").write_text("")
    assert "file cannot be written" in keygen(tmp_path / "file", status=1)
