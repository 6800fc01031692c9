"""``kvferry new-driver`` writes a driver; ``tests/long/drivers`` runs the suite on it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import kvferry
from kvferry.cli import new_driver
from kvferry.cli.new_driver.template import TemplateTransport
from kvferry.core.errors import ConnectError, DriverError, PeerLostError
from kvferry.core.transport import State
from tests.cli.command import Command
from tests.drivers.pairs import closed_at_end, paired


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The distribution of a new driver ``my_nic``, in the current folder."""
    monkeypatch.chdir(tmp_path)
    new_driver.run("my_nic")
    return tmp_path / "kvferry-my-nic"


def test_files_name_the_driver_everywhere(folder: Path) -> None:
    texts = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert set(texts) == {"pyproject.toml", "kvferry_my_nic/__init__.py", "tests/test_contract.py"}
    assert "template" not in "".join(texts.values()).lower()
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    assert project["name"] == "kvferry-my-nic"
    assert project["entry-points"]["kvferry.drivers"] == {"my_nic": "kvferry_my_nic:MyNicTransport"}
    assert f"kvferry>={kvferry.__version__}" in project["dependencies"]
    assert "class TestMyNic(TransportContract)" in texts["tests/test_contract.py"]


def test_the_driver_reads_cancels_and_notices_that_a_peer_is_gone() -> None:
    with closed_at_end(TemplateTransport) as make:
        pair = paired(make(), make(), 4096)
        reader, address = pair.reader, pair.other.address()
        assert pair.works()
        assert reader.path(pair.peer) == ""
        cancelled, lost = pair.lasting(), pair.lasting()
        assert pair.status(cancelled).state is State.PENDING
        reader.cancel(cancelled)
        assert pair.status(cancelled).state is State.FAILED
        assert pair.status(lost).state is State.PENDING
        reader.disconnect(pair.peer)
        assert pair.status(lost).state is State.FAILED
        pair = replace(pair, peer=reader.connect(address))
        pair.other.close()
        status = pair.moved()
        assert (status.state, type(status.error)) == (State.FAILED, PeerLostError)
        elsewhere = msgspec.msgpack.encode(msgspec.msgpack.decode(address) | {"host": "another"})
        for wrong, words in (
            (address, "is closed"),
            (elsewhere, "is on another host"),
            (b"nonsense", "not an address of the driver"),
        ):
            with pytest.raises(ConnectError, match=words):
                make().connect(wrong)


@pytest.mark.parametrize("name", ["", "My", "1st", "a-b", "../x", "class", "a" * 33, "loopback"])
def test_name_that_cannot_be_a_drivers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    said = "is installed already" if name == "loopback" else "cannot be the name of a driver here"
    with pytest.raises(DriverError, match=f"{name!r} {said}"):
        new_driver.run(name)
    assert list(tmp_path.iterdir()) == []


def test_command_says_what_comes_next_and_overwrites_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrote = command.run("new-driver", "my_nic")
    assert (wrote.status, wrote.err) == (0, "")
    assert "pip install --editable 'kvferry-my-nic[test]'" in wrote.out
    project = tmp_path / "kvferry-my-nic" / "pyproject.toml"
    project.write_text("mine")
    again = command.run("new-driver", "my_nic")
    assert again.status == 1
    assert "kvferry-my-nic cannot be written (File exists)" in again.err
    assert project.read_text() == "mine"
