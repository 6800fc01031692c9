"""A transfer of several parts: one outcome, one notification, and every handle given back."""

from __future__ import annotations

from functools import partial

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.memory import Region
from kvferry.core.transport import PeerId, State, TransferId
from kvferry.drivers.nixl.agent import Handle
from kvferry.drivers.nixl.job import Job
from tests.drivers.nixl.fake import FakeAgent


def make(agent: FakeAgent, parts: int, notify: bytes | None = None) -> tuple[Job, list[Handle]]:
    job = Job(
        id=TransferId(1),
        peer=PeerId(1),
        name="peer",
        local=frozenset({Region(address=1, nbytes=1)}),
        send=None if notify is None else partial(agent.notify, "peer", notify),
    )
    return job, [agent.handle() for _ in range(parts)]


def test_done_when_all_parts_are_and_notified_then_only() -> None:
    agent = FakeAgent()
    job, handles = make(agent, 3, b"all of it")
    agent.answers = {handles[0]: [True], handles[1]: [False, False, True], handles[2]: [False]}
    job.post(agent, handles)
    assert job.status.state is State.PENDING
    job.advance(agent)
    assert (job.status.state, agent.sent) == (State.PENDING, [])
    job.advance(agent)
    assert (job.status.state, agent.sent) == (State.DONE, [("peer", b"all of it")])
    assert not agent.held


def test_a_failed_part_dooms_until_it_is_settled() -> None:
    agent = FakeAgent()
    job, handles = make(agent, 2, b"never")
    agent.answers = {handles[0]: [False, PeerLostError("gone")], handles[1]: [False, False, True]}
    job.post(agent, handles)
    job.advance(agent)
    assert (job.status.state, str(job.status.error)) == (State.DOOMED, "gone")
    job.advance(agent)
    assert job.status.state is State.DOOMED
    assert job.running == []
    assert job.settle(agent) == []
    assert (job.status.state, str(job.status.error)) == (State.FAILED, "gone")
    assert not agent.held
    assert agent.sent == []


def test_after_a_part_that_fails_at_once_no_other_is_posted() -> None:
    agent = FakeAgent()
    job, handles = make(agent, 3)
    agent.answers = {handles[0]: [False, True], handles[1]: [TransportError("refused")]}
    job.post(agent, handles)
    assert agent.posted == handles[:2]
    assert job.status.state is State.DOOMED
    assert handles[2] not in agent.held
    job.settle(agent)
    assert not agent.held


def test_all_bytes_there_and_no_notification_is_a_failure_that_is_quiet() -> None:
    agent = FakeAgent()
    job, handles = make(agent, 1)

    def lost() -> None:
        raise PeerLostError("gone")

    job.send = lost
    job.post(agent, handles)
    assert job.status.state is State.FAILED
    assert not agent.held


def test_of_no_parts_it_is_done_at_once() -> None:
    agent = FakeAgent()
    job, handles = make(agent, 0, b"still said")
    job.post(agent, handles)
    assert (job.status.state, agent.sent) == (State.DONE, [("peer", b"still said")])


def test_a_disconnect_in_flight_is_not_undone_by_a_good_end() -> None:
    agent = FakeAgent()
    job, handles = make(agent, 1, b"too late")
    agent.answers = {handles[0]: [False, True]}
    job.post(agent, handles)
    job.doom(PeerLostError("disconnected"))
    job.advance(agent)
    job.settle(agent)
    assert (job.status.state, agent.sent) == (State.FAILED, [])


def test_an_error_is_kept_without_the_frames_that_hold_the_agent() -> None:
    agent = FakeAgent()
    job, handles = make(agent, 2)
    agent.answers = {handles[0]: [PeerLostError("gone")]}
    job.post(agent, handles)
    assert job.status.error is not None
    assert job.status.error.__traceback__ is None
