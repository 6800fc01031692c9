"""Refusals that all drivers share, and their messages."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
import pytest

from kvferry.core.errors import DriverError, TransportUnsupportedError, TransportUsageError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, Status, TransferId
from kvferry.core.transport.copies import copies_between
from kvferry.core.transport.refusals import (
    TransportOwner,
    check_final,
    check_payload,
    check_registered,
    check_unused,
    find_peer,
    find_transfer,
    local_regions,
    parse_options,
    remote_regions,
)

HERE = Region(address=1 << 20, nbytes=4096)
THERE = Region(address=2 << 20, nbytes=4096)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    threads: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2
    backend: str = "fast"


def test_an_owner_may_call_until_it_is_closed() -> None:
    owner = TransportOwner("me")
    owner.check()
    assert owner.end()
    assert not owner.end()
    with pytest.raises(TransportUsageError, match="me is closed"):
        owner.check()


def test_a_forked_process_may_not_call_and_does_not_close() -> None:
    owner = TransportOwner("me")
    child = os.fork()
    if child == 0:
        try:
            owner.check()
        except TransportUsageError as exc:
            os._exit(0 if "fork" in str(exc) and not owner.end() else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    owner.check()


def test_options_are_converted_to_their_struct() -> None:
    assert parse_options("mine", Options, {"threads": 3}) == Options(threads=3)


@pytest.mark.parametrize(
    "options", [{"thread": 3}, {"threads": "3"}, {"threads": 9}, {"backend": None}]
)
def test_an_unknown_option_is_refused_with_all_known_ones(options: dict[str, object]) -> None:
    with pytest.raises(DriverError, match=r"of mine: .*has.*threads \(2\), backend \(fast\)"):
        parse_options("mine", Options, options)


def test_unknown_peers_and_transfers_are_named() -> None:
    assert find_peer({PeerId(1): "one"}, PeerId(1)) == "one"
    with pytest.raises(TransportUsageError, match=r"no peer 2; connected: \[1\]"):
        find_peer({PeerId(1): "one"}, PeerId(2))
    assert find_transfer({TransferId(1): "one"}, TransferId(1)) == "one"
    with pytest.raises(TransportUsageError, match="no transfer 2"):
        find_transfer({TransferId(1): "one"}, TransferId(2))


@pytest.mark.parametrize("state", State)
def test_only_final_transfers_can_be_forgotten(state: State) -> None:
    if state.final:
        check_final(TransferId(1), Status(state=state))
        return
    with pytest.raises(TransportUsageError, match="transfer 1 is not final"):
        check_final(TransferId(1), Status(state=state))


def test_only_registered_unused_regions_can_be_deregistered() -> None:
    check_registered(HERE, {HERE})
    check_unused(HERE, {THERE})
    with pytest.raises(TransportUsageError, match="is not registered"):
        check_registered(HERE, {THERE})
    with pytest.raises(TransportUsageError, match="an unfinished transfer uses"):
        check_unused(HERE, {HERE})


@pytest.mark.parametrize(("payload", "message"), [(b"", "0"), (b"123456789", "9"), ("text", "str")])
def test_an_invalid_payload_is_refused(payload: object, message: str) -> None:
    with pytest.raises(TransportUsageError, match=f"is 1 to 8 bytes; this one: {message}"):
        check_payload(payload, 8)


def test_a_payload_is_refused_without_notifications() -> None:
    check_payload(b"12345678", 8)
    with pytest.raises(TransportUnsupportedError, match="no notifications"):
        check_payload(b"1", 0)


def test_regions_of_a_batch_must_be_known_on_both_sides() -> None:
    copies = copies_between([(0, 0, 8)], local=HERE, remote=THERE)
    assert local_regions(copies, {HERE}) == {HERE}
    assert remote_regions(copies, {THERE}, "peer") == {THERE}
    with pytest.raises(TransportUsageError, match=r"local .* is not registered; 1 regions are"):
        local_regions(copies, {THERE})
    with pytest.raises(TransportUsageError, match=r"among the 1 regions known of peer: .*again"):
        remote_regions(copies, {HERE}, "peer")
