"""``HoldUsers``: which requests share a hold, and which load sends "done"."""

from __future__ import annotations

import pytest

from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import RequestId
from tests.core.messages import ticket

A, B, C, D = (RequestId(name) for name in "abcd")


@pytest.mark.parametrize("first", [True, False])
def test_done_is_ordered_with_a_ticket_that_loaded(first: bool) -> None:
    """Of two tickets for one hold, a client has altered the address in one."""
    users, good, bad = HoldUsers(), ticket(), ticket(host="10.6.6.6")
    pair = [(A, good, True), (B, bad, False)]
    for request, one, _ in pair if first else pair[::-1]:
        users.add(request, one)
    for request, _, _ in pair:
        users.order(request)
    for request, _, loaded in pair:
        users.over(request, loaded=loaded)
    assert users.take_unused() == [good]
