"""A transfer of several parts: one outcome, one notification, and every handle given back."""

from __future__ import annotations

from functools import partial

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.transport import State
from kvferry.drivers.nixl.agent import TransferChunk
from kvferry.drivers.nixl.peer import NixlPeer
from kvferry.drivers.nixl.transfer import NixlTransfer
from tests.drivers.nixl.fake import FakeAgent


def make(
    agent: FakeAgent, parts: int, notify: bytes | None = None
) -> tuple[NixlTransfer, list[TransferChunk]]:
    job = NixlTransfer(
        peer=NixlPeer(name="peer", itself=False),
        prepare=agent.prepare,
        send=None if notify is None else partial(agent.notify, "peer", notify),
    )
    return job, [TransferChunk(write=False, local=None, remote=None) for _ in range(parts)]


def test_done_when_all_parts_are_and_notified_then_only() -> None:
    agent = FakeAgent()
    job, parts = make(agent, 3, b"all of it")
    agent.answers = {parts[0]: [True], parts[1]: [False, False, True], parts[2]: [False]}
    job.post(parts)
    assert job.status.state is State.PENDING
    job.advance()
    assert (job.status.state, agent.sent) == (State.PENDING, [])
    job.advance()
    assert (job.status.state, agent.sent) == (State.DONE, [("peer", b"all of it")])
    assert not agent.held


def test_a_failed_part_dooms_until_it_is_settled() -> None:
    agent = FakeAgent()
    job, parts = make(agent, 2, b"never")
    agent.answers = {parts[0]: [False, PeerLostError("gone")], parts[1]: [False, False, True]}
    job.post(parts)
    job.advance()
    assert (job.status.state, str(job.status.error)) == (State.FAILING, "gone")
    job.advance()
    assert job.status.state is State.FAILING
    assert job.running == []
    assert job.release() == []
    assert job.status.state is State.FAILING
    assert not agent.held
    job.settle()
    assert (job.status.state, str(job.status.error)) == (State.FAILED, "gone")
    assert agent.sent == []


def test_after_a_part_that_fails_at_once_no_other_is_posted() -> None:
    agent = FakeAgent()
    job, parts = make(agent, 3)
    agent.answers = {parts[0]: [False, True], parts[1]: [TransportError("refused")]}
    job.post(parts)
    assert agent.posted == parts[:2]
    assert job.status.state is State.FAILING
    assert len(agent.held) == 2
    job.release()
    assert not agent.held


def test_a_part_is_prepared_when_its_turn_has_come() -> None:
    """By whoever posts by then."""
    first, second = FakeAgent(), FakeAgent()
    job, parts = make(first, 3)
    first.answers = {parts[0]: [False, True], parts[1]: [False, True]}
    job.post(parts)
    job.prepare = second.prepare
    job.advance()
    assert (first.posted, second.posted) == (parts[:2], parts[2:])
    assert job.status.state is State.DONE
    assert not first.held
    assert not second.held


def test_where_no_part_is_to_be_had_it_is_quiet() -> None:
    agent = FakeAgent()
    agent.gone = PeerLostError("gone")
    job, parts = make(agent, 2, b"never")
    job.post(parts)
    assert (job.status.state, str(job.status.error)) == (State.FAILED, "gone")
    assert job.drained
    assert (agent.posted, agent.sent) == ([], [])


def test_where_the_next_part_is_not_to_be_had_the_one_that_moves_must_be_settled() -> None:
    agent = FakeAgent()
    job, parts = make(agent, 3)
    agent.answers = {parts[0]: [False, True], parts[1]: [False, False, True]}
    job.post(parts)
    agent.gone = PeerLostError("gone")
    job.advance()
    job.advance()
    assert (job.drained, job.status.state) == (True, State.FAILING)
    job.release()
    job.settle()
    assert (job.drained, job.status.state) == (True, State.FAILED)
    assert not agent.held


def test_all_bytes_there_and_no_notification_is_a_failure_that_is_quiet() -> None:
    agent = FakeAgent()
    job, parts = make(agent, 1)

    def lost() -> None:
        raise PeerLostError("gone")

    job.send = lost
    job.post(parts)
    assert job.status.state is State.FAILED
    assert not agent.held


def test_of_no_parts_it_is_done_at_once() -> None:
    agent = FakeAgent()
    job, parts = make(agent, 0, b"still said")
    job.post(parts)
    assert (job.status.state, agent.sent) == (State.DONE, [("peer", b"still said")])


def test_a_disconnect_in_flight_is_not_undone_by_a_good_end() -> None:
    agent = FakeAgent()
    job, parts = make(agent, 1, b"too late")
    agent.answers = {parts[0]: [False, True]}
    job.post(parts)
    job.fail(PeerLostError("disconnected"))
    job.advance()
    job.settle()
    assert (job.status.state, agent.sent) == (State.FAILED, [])


def test_an_error_is_kept_without_the_frames_that_hold_the_agent() -> None:
    agent = FakeAgent()
    job, parts = make(agent, 2)
    agent.answers = {parts[0]: [PeerLostError("gone")]}
    job.post(parts)
    assert job.status.error is not None
    assert job.status.error.__traceback__ is None
