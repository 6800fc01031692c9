"""A transfer of several chunks: one outcome, one notification, and every handle given back."""

from __future__ import annotations

from functools import partial

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.transport import State
from kvferry.drivers.nixl.agent import TransferChunk
from kvferry.drivers.nixl.peer import NixlPeer
from kvferry.drivers.nixl.transfer import NixlTransfer
from tests.drivers.nixl.fake_agent import FakeAgent


def make_transfer(
    chunks: int, notify: bytes | None = None
) -> tuple[FakeAgent, NixlTransfer, list[TransferChunk]]:
    agent = FakeAgent()
    transfer = NixlTransfer(
        peer=NixlPeer(name="peer", itself=False),
        prepare=agent.prepare,
        send=None if notify is None else partial(agent.notify, "peer", notify),
    )
    return agent, transfer, [TransferChunk(local=None, remote=None) for _ in range(chunks)]


def test_notification_is_sent_when_all_chunks_are_done() -> None:
    agent, transfer, chunks = make_transfer(3, b"all of it")
    agent.answers = {chunks[0]: [True], chunks[1]: [False, False, True], chunks[2]: [False]}
    transfer.post(chunks)
    assert transfer.status.state is State.PENDING
    transfer.advance()
    assert (transfer.status.state, agent.sent) == (State.PENDING, [])
    transfer.advance()
    assert (transfer.status.state, agent.sent) == (State.DONE, [("peer", b"all of it")])
    assert not agent.held


def test_gpu_is_flushed_once_before_the_notification_is_sent() -> None:
    agent, transfer, chunks = make_transfer(2, b"all of it")
    agent.answers = {chunks[1]: [False, True]}
    flushed: list[tuple[State, int]] = []
    transfer.flush = lambda: flushed.append((transfer.status.state, len(agent.sent)))
    transfer.post(chunks)
    assert flushed == []
    transfer.advance()
    transfer.advance()
    assert flushed == [(State.PENDING, 0)]
    assert (transfer.status.state, len(agent.sent)) == (State.DONE, 1)


def test_read_that_cannot_be_flushed_fails_and_sends_nothing() -> None:
    agent, transfer, chunks = make_transfer(1, b"never")

    def refuse() -> None:
        raise TransportError("cannot flush")

    transfer.flush = refuse
    transfer.post(chunks)
    assert (transfer.status.state, str(transfer.status.error)) == (State.FAILED, "cannot flush")
    assert agent.sent == []


def test_failed_chunk_leaves_transfer_failing_until_settled() -> None:
    agent, transfer, chunks = make_transfer(2, b"never")
    agent.answers = {chunks[0]: [False, PeerLostError("gone")], chunks[1]: [False, False, True]}
    transfer.post(chunks)
    transfer.advance()
    assert (transfer.status.state, str(transfer.status.error)) == (State.FAILING, "gone")
    transfer.advance()
    assert transfer.status.state is State.FAILING
    assert transfer.running == []
    transfer.release()
    assert transfer.status.state is State.FAILING
    assert not agent.held
    transfer.settle()
    assert (transfer.status.state, str(transfer.status.error)) == (State.FAILED, "gone")
    assert agent.sent == []


def test_no_chunk_is_posted_after_one_that_fails_at_once() -> None:
    agent, transfer, chunks = make_transfer(3)
    agent.answers = {chunks[0]: [False, True], chunks[1]: [TransportError("refused")]}
    transfer.post(chunks)
    assert agent.posted == chunks[:2]
    assert transfer.status.state is State.FAILING
    assert transfer.status.error is not None
    assert transfer.status.error.__traceback__ is None
    assert len(agent.held) == 2
    transfer.release()
    assert not agent.held


def test_chunk_is_prepared_when_it_is_posted() -> None:
    """A chunk is prepared by the agent that posts transfers by then."""
    first, transfer, chunks = make_transfer(3)
    second = FakeAgent()
    first.answers = {chunks[0]: [False, True], chunks[1]: [False, True]}
    transfer.post(chunks)
    transfer.prepare = second.prepare
    transfer.advance()
    assert (first.posted, second.posted) == (chunks[:2], chunks[2:])
    assert transfer.status.state is State.DONE
    assert not first.held
    assert not second.held


def test_transfer_without_any_prepared_chunk_fails_at_once() -> None:
    agent, transfer, chunks = make_transfer(2, b"never")
    agent.gone = PeerLostError("gone")
    transfer.post(chunks)
    assert (transfer.status.state, str(transfer.status.error)) == (State.FAILED, "gone")
    assert transfer.drained
    assert (agent.posted, agent.sent) == ([], [])


def test_running_chunk_must_be_settled_when_the_next_cannot_be_prepared() -> None:
    agent, transfer, chunks = make_transfer(3)
    agent.answers = {chunks[0]: [False, True], chunks[1]: [False, False, True]}
    transfer.post(chunks)
    agent.gone = PeerLostError("gone")
    transfer.advance()
    transfer.advance()
    assert (transfer.drained, transfer.status.state) == (True, State.FAILING)
    transfer.release()
    transfer.settle()
    assert (transfer.drained, transfer.status.state) == (True, State.FAILED)
    assert not agent.held


def test_lost_notification_fails_a_finished_transfer() -> None:
    agent, transfer, chunks = make_transfer(1)

    def raise_peer_lost() -> None:
        raise PeerLostError("gone")

    transfer.send = raise_peer_lost
    transfer.post(chunks)
    assert transfer.status.state is State.FAILED
    assert not agent.held


def test_transfer_without_chunks_is_done_at_once() -> None:
    agent, transfer, chunks = make_transfer(0, b"still said")
    transfer.post(chunks)
    assert (transfer.status.state, agent.sent) == (State.DONE, [("peer", b"still said")])


def test_transfer_failed_by_disconnect_stays_failed() -> None:
    agent, transfer, chunks = make_transfer(1, b"too late")
    agent.answers = {chunks[0]: [False, True]}
    transfer.post(chunks)
    transfer.fail(PeerLostError("disconnected"))
    transfer.advance()
    transfer.settle()
    assert (transfer.status.state, agent.sent) == (State.FAILED, [])
