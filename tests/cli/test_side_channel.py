"""The keys of a command, as its options name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cli.keygen import run as keygen
from kvferry.cli.side_channel import NONE, keys_of
from kvferry.core.errors import SecretError
from kvferry.core.security import generate

OWN, ENGINE = generate(), generate()
ENVIRONMENT = {"OWN": OWN.secret.hex(), "NONE": "abc", "TWO": f"{'ab' * 32}\n{'cd' * 32}\n"}


def test_no_options_give_no_keys() -> None:
    assert keys_of("", "") is NONE


def test_keys_from_environment_and_text() -> None:
    keys = keys_of("env:OWN", ENGINE.public.hex(), ENVIRONMENT)
    assert (keys.access.own, keys.server) == (OWN, ENGINE.public)
    keys.access.check_server(ENGINE.public)


def test_keys_from_files_of_keygen(tmp_path: Path) -> None:
    keygen(tmp_path, ["prefill", "probe"])
    keys = keys_of(f"file:{tmp_path}/probe.secret", f"file:{tmp_path}/prefill.public")
    assert keys.server.hex() in (tmp_path / "prefill.public").read_text()


@pytest.mark.parametrize(
    ("secret_key", "peer", "why"),
    [
        ("env:OWN", "", "with both --curve-secret-key"),
        ("", ENGINE.public.hex(), "with both --curve-secret-key"),
        ("env:NONE", ENGINE.public.hex(), "env:NONE holds 3 characters"),
        ("env:NOBODY", ENGINE.public.hex(), "env:NOBODY is empty or not set"),
        ("env:NOBODY", "", "env:NOBODY is empty or not set"),
        ("env:OWN", "abc", "line 1 of --curve-peer is no public key"),
        ("env:OWN", "env:TWO", "--curve-peer names 2 keys"),
        (OWN.secret.hex(), ENGINE.public.hex(), "and not where it is"),
    ],
    ids=map(str, range(8)),  # not by the keys, which are random
)
def test_invalid_keys_are_refused(secret_key: str, peer: str, why: str) -> None:
    with pytest.raises(SecretError, match=why) as caught:
        keys_of(secret_key, peer, ENVIRONMENT)
    assert OWN.secret.hex() not in str(caught.value)
