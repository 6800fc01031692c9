"""Keys, secrets and networks as the configuration names them. Needs no vLLM."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.security import Access, Networks, TicketSecrets, generate
from kvferry.integrations.vllm.config import ConfigError, parse
from kvferry.integrations.vllm.security import (
    SecuritySettings,
    read_security_settings,
    warn_of_open_access,
)

OWN, PEER, OTHER = generate(), generate(), generate()
SECRET = "a secret of both engines"
ENVIRONMENT = {"OWN": OWN.secret.hex(), "SECRET": SECRET, "PEERS": PEER.public.hex()}


def admitted(**settings: Any) -> SecuritySettings:
    return read_security_settings(parse(settings), ENVIRONMENT)


def test_nothing_set() -> None:
    assert admitted() == SecuritySettings()
    access = admitted().access
    assert access.allows("127.0.0.1")
    assert access.allows("10.1.2.3")
    assert not access.allows("192.0.2.7")


def test_anywhere_has_to_be_said() -> None:
    assert admitted(allowed_peers="anywhere").access == Access()


def test_everything_from_the_environment() -> None:
    got = admitted(
        ticket_secrets=["env:SECRET"],
        curve_secret_key="env:OWN",
        curve_peers=["env:PEERS", OTHER.public.hex()],
        allowed_peers=["10.0.0.0/8"],
    )
    assert got == SecuritySettings(
        access=Access(
            own=OWN,
            peers=frozenset({PEER.public, OTHER.public}),
            networks=Networks.of(["10.0.0.0/8"]),
        ),
        secrets=TicketSecrets.of([SECRET]),
    )


def test_everything_from_files(tmp_path: Path) -> None:
    contents = {
        "own": OWN.secret.hex(),
        "peers": f"# two engines\n{PEER.public.hex()}\n{OTHER.public.hex()}\n",
        "new": "a new secret of both engines",
        "old": SECRET,
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    got = admitted(
        ticket_secrets=[f"file:{tmp_path}/new", f"file:{tmp_path}/old"],
        curve_secret_key=f"file:{tmp_path}/own",
        curve_peers=[f"file:{tmp_path}/peers"],
    )
    assert got == SecuritySettings(
        access=Access(
            own=OWN,
            peers=frozenset({PEER.public, OTHER.public}),
            networks=Networks.nearby(),
        ),
        secrets=TicketSecrets.of([contents["new"], SECRET]),
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ticket_secrets": ["env:NONE"]}, "env:NONE is empty or not set"),
        ({"ticket_secrets": [SECRET]}, "says what a secret is"),
        ({"curve_secret_key": OWN.secret.hex()}, "says what a secret is"),
        ({"curve_secret_key": "env:OWN"}, "curve_secret_key without curve_peers"),
        ({"curve_peers": [PEER.public.hex()]}, "curve_peers without curve_secret_key"),
        ({"curve_secret_key": "env:SECRET"}, "env:SECRET holds 24 characters"),
        ({"curve_secret_key": "env:OWN", "curve_peers": ["x"]}, "line 1 of curve_peers is no"),
        ({"allowed_peers": []}, "allowed_peers is empty"),
        ({"allowed_peers": ["prefill-0"]}, "'prefill-0' in allowed_peers is no network"),
        ({"allowed_peers": ["anywhere"]}, "'anywhere' stands alone, not in a list"),
        ({"allowed_peers": "everywhere"}, "'everywhere' is neither a list of networks"),
    ],
)
def test_a_mistake_is_named_and_no_secret_shown(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="kv_connector_extra_config: ") as refused:
        admitted(**settings)
    assert words in str(refused.value)
    assert SECRET not in str(refused.value)
    assert OWN.secret.hex() not in str(refused.value)


KEYS: dict[str, Any] = {"curve_secret_key": "env:OWN", "curve_peers": ["env:PEERS"]}
SIGNED: dict[str, Any] = {"ticket_secrets": ["env:SECRET"]}
LISTED: dict[str, Any] = {"allowed_peers": ["10.0.0.0/8"]}
FAR: dict[str, Any] = {"allowed_peers": "anywhere"}


@pytest.mark.parametrize(
    ("settings", "host", "told"),
    [
        (FAR, "192.0.2.7", ["side channel at 192.0.2.7 is open", "not signed", "any address"]),
        (KEYS | FAR, "192.0.2.7", ["not signed", "any address"]),
        (SIGNED | FAR, "192.0.2.7", ["side channel at 192.0.2.7 is open"]),
        (KEYS | SIGNED, "192.0.2.7", ["192.0.2.7 has a public address"]),
        ({}, "10.0.0.7", ["side channel at 10.0.0.7 is open", "not signed"]),
        (LISTED, "192.0.2.7", ["side channel at 192.0.2.7 is open", "not signed"]),
        (KEYS | SIGNED | FAR, "192.0.2.7", []),
        (KEYS | SIGNED, "10.0.0.7", []),
        ({}, "127.0.0.1", []),
        ({}, "::1", []),
    ],
)
def test_what_is_open_is_said_at_start(
    settings: dict[str, Any], host: str, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_open_access(admitted(**settings), host)
    assert len(caplog.records) == len(told)
    for words, record in zip(told, caplog.records, strict=True):
        assert words in record.getMessage()


def test_a_secret_that_others_can_read_is_said_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ticket.secret"
    path.write_text(SECRET)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        warn_of_open_access(admitted(ticket_secrets=[f"file:{path}"]), "127.0.0.1")
    assert "chmod 600" in caplog.text
    assert SECRET not in caplog.text
