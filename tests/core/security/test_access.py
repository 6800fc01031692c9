"""``Access``, keys and networks: which peers are admitted."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable

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
    def refuse(error: Exception) -> Callable[..., None]:
        def raised(*_: object) -> None:
            raise error

        return raised

    monkeypatch.setattr(zmq, "curve_public", refuse(zmq.ZMQError(errno.ENOTSUP)))
    with pytest.raises(SecretError, match="built without CURVE: install pyzmq's own wheel"):
        KeyPair.of(OWN.secret.hex(), "here")
    monkeypatch.setattr(Ed25519PrivateKey, "generate", refuse(UnsupportedAlgorithm("no")))
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


@pytest.mark.parametrize("line", ["nonsense", "0" * 63, "0" * 65, "g" * 64])
def test_a_line_that_is_no_key_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(SecretError, match=f"line 2 of here is no public key: it has {len(line)}"):
        public_keys(["# two:", line], "here")


def test_too_many_keys_are_refused() -> None:
    with pytest.raises(SecretError, match="4097 keys; 4096 are allowed"):
        public_keys((f"{n:064x}" for n in range(4097)), "here")


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


@pytest.mark.parametrize("text", ["10.0.0.1/8", "prefill", "", "10.0.0.0/33", "300.0.0.0/8"])
def test_an_invalid_network_is_refused(text: str) -> None:
    with pytest.raises(
        SecretError, match=f"{re.escape(repr(text))} in allowed_peers is no network"
    ):
        Networks.of(["10.0.0.0/8", text])


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

    def none(*arguments: object) -> None:
        raise OSError("no more files")

    monkeypatch.setattr("socket.socket", none)
    assert "127.0.0.1" not in only_this


def test_an_empty_list_of_networks_is_refused() -> None:
    with pytest.raises(SecretError, match="allowed_peers is empty"):
        Networks.of([])


def test_keys_and_peers_must_be_set_together() -> None:
    with pytest.raises(SecretError, match="curve_peers without curve_secret_key"):
        Access(peers=frozenset({PEER.public}))
    with pytest.raises(SecretError, match="curve_secret_key without curve_peers admits nobody"):
        Access(own=OWN)


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
