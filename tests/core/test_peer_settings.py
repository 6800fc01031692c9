"""What settings of every integration warn of, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.core.errors import SecretError
from kvferry.core.peer_settings import PeerSettings
from kvferry.core.security import generate

OWN, PEER = generate(), generate()


def test_an_open_side_channel_and_an_exposed_key_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    PeerSettings().access("10.0.0.7")
    own = tmp_path / "own"
    own.write_text(OWN.secret.hex())
    own.chmod(0o644)
    keyed = PeerSettings(curve_secret_key=f"file:{own}", curve_peers=(PEER.public.hex(),))
    assert keyed.access("10.0.0.7").own == OWN
    is_open, exposed = caplog.messages
    assert "the side channel at 10.0.0.7 is open" in is_open
    assert "chmod 600" in exposed


def test_each_wrong_setting_is_named() -> None:
    wrong = PeerSettings(curve_secret_key="env:NOT_SET", curve_peers=("x",), allowed_peers=("y",))
    with pytest.raises(SecretError, match=r"^curve_secret_key: .*; curve_peers: .*; 'y' in allow"):
        wrong.access("127.0.0.1")
