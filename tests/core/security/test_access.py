"""``Access``, keys and networks: which peers are admitted."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import zmq
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvferry.core.errors import AdmissionError, SecretError
from kvferry.core.security import (
    NEARBY,
    OPEN,
    Access,
    KeyPair,
    Networks,
    TicketKey,
    generate,
    public_keys,
)

OWN, PEER, OTHER = generate(), generate(), generate()


def keyed() -> Access:
    return Access(own=OWN, peers=frozenset({PEER.public}))


def test_a_public_key_is_derived_from_the_secret_one() -> None:
    assert KeyPair.of(OWN.secret.hex(), "here") == OWN
    assert len({OWN.public, OWN.secret, PEER.public, PEER.secret}) == 4
    assert {len(OWN.public), len(OWN.secret)} == {32}


def test_libraries_that_lack_an_algorithm_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=zmq.ZMQError(errno.ENOTSUP))
    monkeypatch.setattr(zmq, "curve_public", refuse)
    with pytest.raises(SecretError, match="built without CURVE: install pyzmq's own wheel"):
        KeyPair.of(OWN.secret.hex(), "here")
    monkeypatch.setattr(Ed25519PrivateKey, "generate", Mock(side_effect=UnsupportedAlgorithm("no")))
    with pytest.raises(SecretError, match=r"no Ed25519 here .* install cryptography's own wheel"):
        TicketKey()


def test_a_secret_key_is_not_shown() -> None:
    assert repr(OWN.secret)[2:-1] not in repr(OWN)
    with pytest.raises(SecretError, match="here holds 63 characters") as refused:
        KeyPair.of(OWN.secret.hex()[1:], "here")
    assert OWN.secret.hex()[1:] not in str(refused.value)


def test_lists_of_public_keys_may_have_comments() -> None:
    lines = ["# ours", "", PEER.public.hex(), f" {OTHER.public.hex().upper()} "]
    assert public_keys(lines, "here") == {PEER.public, OTHER.public}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (partial(public_keys, ["# two:", line], "here"), f"line 2 of here .* has {len(line)}")
            for line in ("nonsense", "0" * 63, "0" * 65, "g" * 64)
        ),
        (partial(public_keys, [f"{n:064x}" for n in range(4097)], "x"), "4097 keys; 4096 are"),
        *(
            (partial(Networks.of, ["10.0.0.0/8", text]), f"{re.escape(repr(text))} in allowed_peer")
            for text in ("10.0.0.1/8", "prefill", "", "10.0.0.0/33", "300.0.0.0/8")
        ),
        (partial(Networks.of, []), "allowed_peers is empty"),
        (partial(Access, peers=frozenset({PEER.public})), "curve_peers without curve_secret_key"),
        (partial(Access, own=OWN), "curve_secret_key without curve_peers admits nobody"),
    ],
)
def test_settings_that_are_none_or_contradict_are_refused(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(SecretError, match=message):
        make()


@pytest.mark.parametrize(
    ("networks", "inside", "outside"),
    [
        (["10.0.0.0/8"], ["10.1.2.3", "::ffff:10.1.2.3"], ["11.0.0.1", "::1", "::10.1.2.3"]),
        (["192.168.1.7"], ["192.168.1.7"], ["192.168.1.8"]),
        (["fd00::/8", "127.0.0.0/8"], ["fd12::1", "127.0.0.9"], ["fe80::1%lo", "128.0.0.1"]),
        (["fe80::/10"], ["fe80::1", "fe80::1%lo"], ["fec0::1"]),
        (["0.0.0.0/0"], ["8.8.8.8"], ["::1", "no address", ""]),
    ],
)
def test_networks_contain_their_addresses(
    networks: list[str], inside: list[str], outside: list[str]
) -> None:
    allowed = Networks.of(networks)
    assert [address for address in inside + outside if address in allowed] == inside


NEAR = [
    *("127.0.0.1", "127.1.2.3", "::1", "10.0.0.1", "172.16.0.1", "172.31.255.255"),
    *("192.168.7.7", "100.64.0.1", "100.127.0.1", "169.254.1.1", "fe80::1%lo", "fd00::1"),
    *("fc00::1", "::ffff:10.0.0.1"),
]
FAR = [
    *("8.8.8.8", "192.0.2.7", "172.32.0.1", "100.128.0.1", "192.169.0.1", "11.0.0.1"),
    *("2001:db8::1", "::ffff:8.8.8.8", "0.0.0.0", "::", "255.255.255.255", "no address", ""),
]


def test_this_host_and_private_networks_are_nearby() -> None:
    assert [address for address in NEAR + FAR if NEARBY.allows(address)] == NEAR
    assert str(NEARBY.networks) == "this host and private networks"


def test_a_host_with_a_public_address_is_nearby_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test the loopback address stands for a public one."""
    only_this = Networks(Networks.of(["192.0.2.0/24"]).networks, this_host=True)
    assert "127.0.0.1" in only_this
    assert "10.255.255.254" not in only_this
    assert "127.0.0.1" not in Networks.of(["192.0.2.0/24"])
    monkeypatch.setattr("socket.socket", Mock(side_effect=OSError("no more files")))
    assert "127.0.0.1" not in only_this


@pytest.mark.parametrize(
    ("access", "key", "message"),
    [
        (OPEN, PEER.public, "encrypted, and this engine has no keys: set curve_secret_key"),
        (keyed(), b"", "its tickets name no key, and this engine has keys"),
        (keyed(), OTHER.public, f"its key is {OTHER.public.hex()}, which is not listed here"),
    ],
    ids=["no keys here", "no key there", "another's key"],
)
def test_a_peer_that_may_not_be_connected_to_is_refused(
    access: Access, key: bytes, message: str
) -> None:
    with pytest.raises(AdmissionError, match=message):
        access.check_server(key)
