"""Proofs of tickets, valid and invalid, and fingerprints of keys."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import TicketError, TicketReason
from kvferry.core.security import Proof, TicketKey
from kvferry.core.security.ticket_proof import (
    CONTENT_BYTES,
    PROOF_BYTES,
    TICKET_KEY_BYTES,
    check,
    content_of,
    fingerprint,
    verify,
)

KEY, OTHER = TicketKey(), TicketKey()
SAID: dict[str, Any] = {
    "remote_block_ids": [[1, 2, 3], []],
    "kvferry": {
        "slot": 3,
        "computed": True,
        "digest": "00ff",
        "of_a_newer_version": ["\u00fc", None],
    },
}


def proof(said: dict[str, Any] = SAID, key: TicketKey = KEY) -> Proof:
    return Proof(key=key.public, content=content_of(said), signature=key.sign(said))


def test_a_proof_is_valid_also_after_json() -> None:
    again = json.loads(json.dumps(SAID, sort_keys=True, indent=1))
    check(replace(proof(), content=content_of(again)), KEY.public)


def test_a_proof_of_another_build_is_valid() -> None:
    """The signed bytes and the fingerprint are the same in every build."""
    known = Proof(
        key=bytes.fromhex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"),
        content=content_of(SAID),
        signature=bytes.fromhex(
            "ce7da6fb790c099cfb83ab6b86b3e6478dc16b939234095714d48f6b4fe20584"
            "c9a9429f96de91ae3acd237a76f0658439e62b5586a9b82611856b968beb4501"
        ),
    )
    check(known, known.key)
    assert fingerprint(known.key).hex() == "7e538c9bd0d5ffa7fa17f1e142d7e0f6"


@given(where=st.sampled_from(["key", "content", "signature"]), data=st.data())
def test_a_proof_with_a_changed_bit_is_refused(where: str, data: st.DataObject) -> None:
    value = bytearray(getattr(proof(), where))
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    assert not verify(replace(proof(), **{where: bytes(value)}))


CHANGED = content_of(SAID | {"remote_block_ids": [[1, 2, 4], []]})
ONLY_THE_HASH = KEY._private.sign(content_of(SAID))


@pytest.mark.parametrize(
    ("given", "published", "message"),
    [
        (replace(proof(), content=CHANGED), KEY.public, "altered on its way"),
        (replace(proof(), signature=ONLY_THE_HASH), KEY.public, "altered on its way"),
        (proof(key=OTHER), KEY.public, "another key"),
        (None, KEY.public, "the proof was taken away"),
        (proof(), b"", "publishes none"),
    ],
)
def test_a_proof_that_does_not_fit_is_refused(
    given: Proof | None, published: bytes, message: str
) -> None:
    with pytest.raises(TicketError, match=message) as raised:
        check(given, published)
    assert raised.value.reason is TicketReason.PROOF
    check(None, b"")


@pytest.mark.parametrize(
    ("field", "size", "message"),
    [
        ("key", TICKET_KEY_BYTES, "ticket_key"),
        ("content", CONTENT_BYTES, "content"),
        ("signature", PROOF_BYTES, "proof"),
    ],
)
def test_a_part_of_the_wrong_length_is_refused_by_name(field: str, size: int, message: str) -> None:
    for length in (0, size - 1, size + 1):
        with pytest.raises(TicketError, match=f"{message} has {length} bytes; it has {size}"):
            replace(proof(), **{field: bytes(length)})


def test_content_that_json_cannot_encode_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for content in (object(), deep, "\ud800"):
        with pytest.raises(TicketError, match="cannot be proved"):
            content_of({"kvferry": content})


def test_the_crypto_library_is_imported_only_when_needed() -> None:
    code = (
        "import sys; import kvferry.core.endpoint, kvferry.core.security; "
        "print('cryptography' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
