"""Keys, secrets and networks as the configuration names them. Needs no vLLM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.security import (
    Access,
    Networks,
    PeerKeys,
    SecurityFiles,
    TicketSecrets,
    generate,
)
from kvferry.integrations.vllm.config import ConfigError, parse
from kvferry.integrations.vllm.security import (
    SecuritySettings,
    read_security_settings,
    security_files,
    warn_of_open_access,
)
from tests.waiting import eventually

CORE = "kvferry.core.security.security_files"
OWN, PEER, OTHER = generate(), generate(), generate()
SECRET = "a secret of both engines"
ENVIRONMENT = {"OWN": OWN.secret.hex(), "SECRET": SECRET, "PEERS": PEER.public.hex()}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def admitted(**settings: Any) -> SecuritySettings:
    return read_security_settings(parse(settings))


def test_nothing_set() -> None:
    assert admitted() == SecuritySettings()
    access = admitted().access
    assert [access.allows(at) for at in ("127.0.0.1", "10.1.2.3", "192.0.2.7")] == [
        True,
        True,
        False,
    ]
    assert admitted(allowed_peers="anywhere").access == Access()


def test_everything_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEW", "a new secret of both engines")
    monkeypatch.setenv("PEERS", f"# two engines\n{PEER.public.hex()}\n{OTHER.public.hex()}\n")
    got = admitted(**KEYS, ticket_secrets=["env:NEW", "env:SECRET"])
    assert got == SecuritySettings(
        access=Access(
            own=OWN,
            peers=frozenset({PEER.public, OTHER.public}),
            networks=Networks.nearby(),
        ),
        secrets=TicketSecrets.of(["a new secret of both engines", SECRET]),
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
        ({"curve_secret_key": "env:NONE", "curve_peers": ["env:PEERS"]}, "env:NONE is empty"),
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
    assert str(refused.value).count("kv_connector_extra_config") == 1
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
        (KEYS | SIGNED, "no-such-host.invalid", []),  # that nobody can listen there is said later
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


# Files that change while the engine runs.


class Files:
    """Files of one engine: its own key, the keys of its peers, and its ticket secrets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.write("own", OWN.secret.hex())
        self.write("peers", PEER.public.hex())
        self.write("tickets", SECRET)
        self.config = parse(
            {
                "ticket_secrets": [f"file:{folder}/tickets"],
                "curve_secret_key": f"file:{folder}/own",
                "curve_peers": [f"file:{folder}/peers"],
            }
        )
        self.settings = read_security_settings(self.config)

    def write(self, name: str, content: str, mode: int = 0o600) -> None:
        """Replace a file as one that writes safely does: by a rename."""
        newer = self._folder / f"{name}.newer"
        newer.write_text(content)
        newer.chmod(mode)
        newer.rename(self._folder / name)

    @contextmanager
    def watched(self, *, is_worker: bool = False) -> Iterator[None]:
        config, settings, who = self.config, self.settings, "rank 5"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{CORE}.LOOK_SECONDS", 0.01)
            with closing(
                SecurityFiles(config.curve_peers, settings.access, who=who)
                if is_worker
                else security_files(config, settings, who=who)
            ):
                yield


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def signs_with(settings: SecuritySettings, secrets: Sequence[str]) -> bool:
    return settings.secrets == TicketSecrets.of(secrets)


NEW = "another secret of both engines"


def test_ticket_secrets_are_replaced_in_three_edits(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    with files.watched(), caplog.at_level(logging.INFO):
        for secrets in ([SECRET, NEW], [NEW, SECRET], [NEW]):
            files.write("tickets", "\n".join(secrets) + "\n")
            eventually(partial(signs_with, files.settings, secrets))
        eventually(lambda: len(caplog.records) == 3)
    assert [record.getMessage().partition("again: ")[2] for record in caplog.records] == [
        "2 secret(s), and tickets are signed with the same one as before",
        "2 secret(s), and tickets are signed with another one than before",
        "1 secret(s), and tickets are signed with the same one as before",
    ]
    assert NEW not in caplog.text


@pytest.mark.parametrize("is_worker", [False, True])
def test_keys_of_peers_are_added_and_removed(
    files: Files, caplog: pytest.LogCaptureFixture, is_worker: bool
) -> None:
    peers = files.settings.access.peers
    with files.watched(is_worker=is_worker), caplog.at_level(logging.INFO):
        files.write("peers", f"# two\n{PEER.public.hex()}\n{OTHER.public.hex()}\n")
        eventually(lambda: peers == {PEER.public, OTHER.public})
        files.write("peers", OTHER.public.hex())
        eventually(lambda: peers == {OTHER.public})
        eventually(lambda: len(caplog.records) == 2)
    assert caplog.messages == [
        "rank 5: curve_peers was read again: 2 key(s)",
        "rank 5: curve_peers was read again: 1 key(s)",
    ]


HALF_A_KEY = f"{OTHER.public.hex()}\n{PEER.public.hex()[:30]}"


@pytest.mark.parametrize(
    ("name", "content", "mode", "words"),
    [
        ("tickets", f"{NEW}\nhalf", 0o600, "ticket secret 2 has 4 bytes; 16 is the least"),
        ("tickets", "", 0o600, "is empty or not set: 'kvferry keygen' makes such files"),
        ("tickets", NEW, 0o640, "is open to others than its owner: chmod 600 it"),
        ("peers", HALF_A_KEY, 0o600, "line 2 of file:"),
        ("peers", "# none\n", 0o600, "admits nobody: list the public keys"),
    ],
    ids=range(5),  # the keys are random
)
def test_a_file_that_cannot_be_used_is_named_and_the_values_stay(
    files: Files,
    caplog: pytest.LogCaptureFixture,
    name: str,
    content: str,
    mode: int,
    words: str,
) -> None:
    before = read_security_settings(files.config)
    with files.watched():
        files.write(name, content, mode)
        eventually(lambda: bool(caplog.records))
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "stays as it was: " in record.getMessage()
    assert words in record.getMessage()
    assert files.settings == before
    secrets = (SECRET, NEW, OWN.secret.hex(), OTHER.secret.hex())
    assert [secret for secret in secrets if secret in caplog.text] == []


def test_what_one_reading_finds_is_not_used_and_an_error_does_not_end_the_thread(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    half, other, last = ({generate().public} for _ in range(3))
    found = iter([half, other, half, MemoryError("for this test"), other, half])
    used: list[set[bytes]] = []

    def read(listed: object, name: str) -> object:
        keys = next(found, last)
        if isinstance(keys, MemoryError):
            raise keys
        return keys

    monkeypatch.setattr(f"{CORE}.listed_keys", read)
    monkeypatch.setattr(PeerKeys, "replace", lambda _, keys: used.append(keys))
    with files.watched():
        eventually(lambda: bool(used))
    assert used[0] == last
    assert "rank 5: a key or secret could not be read again" in caplog.text


def test_a_reading_that_hangs_does_not_hold_up_the_end_of_the_engine(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def read(listed: object, name: str) -> frozenset[bytes]:
        hangs.set()
        assert goes_on.wait(60.0)
        return frozenset({PEER.public})

    monkeypatch.setattr(f"{CORE}.listed_keys", read)
    with files.watched():
        assert hangs.wait(60.0)
    goes_on.set()


def test_a_secret_that_others_can_read_is_said_at_start(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.write("tickets", SECRET, 0o644)
    warn_of_open_access(read_security_settings(files.config), "127.0.0.1")
    assert "chmod 600" in caplog.text
    assert SECRET not in caplog.text
