"""Signatures of tickets, valid and invalid, and the replacement of secrets."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from kvferry.core.errors import SecretError, TicketError
from kvferry.core.security import TicketSecrets

OLD, NEW = "old secret of many bytes", "new secret of many bytes"
SAID: dict[str, Any] = {
    "remote_block_ids": [[1, 2, 3], []],
    "kvferry": {"slot": 3, "computed": True, "digest": "00ff"},
}


def secrets(*texts: str) -> TicketSecrets:
    return TicketSecrets.of(texts)


def test_a_signature_is_valid_also_after_json() -> None:
    signature = secrets(NEW).sign(SAID)
    assert len(signature) == 32
    secrets(NEW).check(json.loads(json.dumps(SAID, sort_keys=True)), signature)


def test_a_secret_can_be_replaced_without_a_refusal() -> None:
    """Steps: old; old and new; new and old; new. Each accepts signatures of its neighbours."""
    steps = [secrets(OLD), secrets(OLD, NEW), secrets(f"{NEW}\n\n  {OLD} \r\n"), secrets(NEW)]
    for one, next_one in itertools.pairwise(steps):
        next_one.check(SAID, one.sign(SAID))
        one.check(SAID, next_one.sign(SAID))
    running, old = secrets(OLD), secrets(OLD).sign(SAID)
    for step in steps:
        running.check(SAID, old)
        running.replace(step)
    assert running.sign(SAID) == secrets(NEW).sign(SAID)
    with pytest.raises(TicketError):
        running.check(SAID, old)


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        (b"", "not signed, and this engine has ticket_secrets"),
        *((made_up, "altered or made up") for made_up in (b"x", bytes(31), bytes(32), bytes(33))),
        (secrets(OLD).sign(SAID), "signs with none of the 1 ticket_secrets of this one"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused(signature: bytes, message: str) -> None:
    with pytest.raises(TicketError, match=message):
        secrets(NEW).check(SAID, signature)


@pytest.mark.parametrize(
    "changed",
    [
        SAID | {"added": None},
        SAID | {"remote_block_ids": [[1, 2, 4], []]},
        SAID | {"remote_block_ids": [[1, 2], [3]]},
        SAID | {"kvferry": SAID["kvferry"] | {"added": ""}},
        SAID | {"kvferry": SAID["kvferry"] | {"computed": 1}},
        SAID | {"kvferry": SAID["kvferry"] | {"slot": "3"}},
        {"kvferry": SAID["kvferry"]},
    ],
)
def test_a_single_change_anywhere_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(TicketError, match="altered or made up"):
        secrets(NEW).check(changed, secrets(NEW).sign(SAID))


@pytest.mark.parametrize("content", [{"x": {1, 2}}, {"x": b"y"}, {1: 2, "x": 3}])
def test_content_that_json_cannot_encode_is_a_ticket_error(content: Any) -> None:
    with pytest.raises(TicketError, match="cannot be signed"):
        secrets(NEW).check(content, b"x")


def test_text_with_lone_surrogates_can_be_signed() -> None:
    """Users choose request ids, so making a ticket must not raise."""
    assert secrets(NEW).sign({"request": "\ud800"})


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "0 ticket secrets; 1 to 8"),
        ([f"{n} is a secret of bytes" for n in range(9)], "9 ticket secrets"),
        ([NEW, "short"], "ticket secret 2 has 5 bytes; 16 is the least"),
        ([NEW, OLD, NEW], "stands twice"),
    ],
)
def test_invalid_secrets_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(SecretError, match=message):
        secrets(*texts)


def test_secrets_are_not_shown() -> None:
    assert NEW not in repr(secrets(NEW))
