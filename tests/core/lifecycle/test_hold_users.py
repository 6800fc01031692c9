"""``HoldUsers``: which requests share a hold, and which load sends "done"."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.lifecycle.hold_users import HoldUsers
from kvferry.core.lifecycle.holds import RequestId
from tests.core.messages import ticket

A, B, C, D = (RequestId(name) for name in "abcd")


def test_done_that_is_not_ordered_yet_waits_for_a_new_user() -> None:
    users = HoldUsers()
    users.add(A, ticket())
    users.order(A, siblings=True)
    users.over(A, loaded=True)
    users.add(B, ticket())
    assert not users.pending
    assert users.order(B, siblings=True) is True
    users.over(B, loaded=True)
    assert users.take_unused() == [ticket()]


def test_holds_with_another_generation_incarnation_or_engine_are_not_shared() -> None:
    users = HoldUsers()
    tickets = (ticket(), ticket(8), ticket(incarnation=6), ticket(engine="another"))
    for request, one in zip((A, B, C, D), tickets, strict=True):
        users.add(request, one)
    assert [users.order(request) for request in (A, B, C, D)] == [False] * 4


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


EVENTS = st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "order", "over", "drain"]))


@given(st.lists(EVENTS, max_size=40))
def test_done_is_sent_once_and_not_before_all_known_users_are_over(
    events: list[tuple[str, str]],
) -> None:
    """A load that is the only user when it is ordered sends it; else it is ordered at the end."""
    users = HoldUsers()
    users.over(A, loaded=True)  # it is not known
    is_ordered: dict[RequestId, bool] = {}
    used = is_done_sent = False
    for name, event in events:
        request = RequestId(name)
        if event == "add" and request not in is_ordered:
            users.add(request, ticket())
            is_ordered[request], used = False, True
        elif event == "order" and is_ordered.get(request) is False:
            is_ordered[request] = True
            alone = not users.order(request)
            assert alone is (len(is_ordered) == 1)
            is_done_sent = is_done_sent or alone
        elif event == "over" and is_ordered.get(request):
            users.over(request, loaded=True)
            del is_ordered[request]
            if is_done_sent and not is_ordered:
                used = is_done_sent = False
        elif event == "drain":
            is_due = used and not is_done_sent and not is_ordered
            assert users.pending is is_due
            assert len(users.take_unused()) == is_due
            used = used and not is_due
    assert len(users) == used
