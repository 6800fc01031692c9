"""A transfer of several chunks: one outcome, one notification, and every handle given back."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.errors import PeerLostError, TransportError
from kvferry.core.transport import State
from kvferry.drivers.nixl.agent import TransferChunk
from kvferry.drivers.nixl.peer import NixlPeer
from kvferry.drivers.nixl.transfer import NixlTransfer
from tests.drivers.nixl.fake_agent import FakeAgent

Answers = list[bool | TransportError]
GONE = PeerLostError("gone")


class Chunks:
    """A transfer whose chunks have the given answers, one list each; not posted yet."""

    def __init__(self, *answers: Answers) -> None:
        self.agent = FakeAgent()
        self.done: list[str] = []
        self.transfer = NixlTransfer(
            peer=NixlPeer(name="peer", itself=False),
            prepare=self.agent.prepare,
            flush=lambda: self.done.append("flushed"),
            send=lambda: self.done.append("sent"),
        )
        self.chunks = [TransferChunk(local=None, remote=None) for _ in answers]
        self.agent.answers = dict(zip(self.chunks, answers, strict=True))

    def post(self) -> NixlTransfer:
        self.transfer.post(self.chunks)
        return self.transfer

    def is_over(self, state: State, error: str = "") -> bool:
        """Return whether it has this outcome, and nothing is held or done that must not be."""
        status = self.transfer.status
        expected = ["flushed", "sent"] if state is State.DONE else []
        assert (self.done, self.agent.held, self.transfer.drained) == (expected, set(), True)
        return (status.state, str(status.error or "")) == (state, error)


def test_gpu_is_flushed_and_then_the_peer_told_when_all_chunks_are_done() -> None:
    chunks = Chunks([True], [False, False, True], [False])
    transfer = chunks.post()
    for _ in range(2):
        assert (transfer.status.state, chunks.done) == (State.PENDING, [])
        transfer.advance()
    transfer.advance()
    assert chunks.is_over(State.DONE)


def test_transfer_without_chunks_is_done_at_once() -> None:
    chunks = Chunks()
    chunks.post()
    assert chunks.is_over(State.DONE)


@pytest.mark.parametrize("step", ["flush", "send"])
def test_transfer_whose_last_step_fails_is_failed(step: str) -> None:
    def refuse() -> None:
        raise GONE

    chunks = Chunks([])
    setattr(chunks.transfer, step, refuse)
    chunks.post()
    assert "sent" not in chunks.done
    chunks.done.clear()
    assert chunks.is_over(State.FAILED, "gone")


@pytest.mark.parametrize(
    ("answers", "advances", "posted"),
    [
        ([[False, GONE], [False, False, True]], 2, 2),
        ([[False, True], [GONE], []], 1, 2),
        ([[GONE], []], 0, 1),
    ],
    ids=["later", "at once", "first"],
)
def test_failed_chunk_leaves_transfer_failing_until_settled(
    answers: list[Answers], advances: int, posted: int
) -> None:
    """No chunk is posted after it; those that run are drained."""
    chunks = Chunks(*answers)
    transfer = chunks.post()
    for _ in range(advances):
        transfer.advance()
    assert (transfer.status.state, transfer.status.error) == (State.FAILING, GONE)
    assert GONE.__traceback__ is None, "its frames would keep the agent alive"
    assert chunks.agent.posted == chunks.chunks[:posted]
    transfer.release()
    assert transfer.status.state is State.FAILING
    transfer.settle()
    assert chunks.is_over(State.FAILED, "gone")


def test_chunk_is_prepared_when_it_is_posted() -> None:
    """A chunk is prepared by the agent that posts transfers by then."""
    chunks, second = Chunks([False, True], [False, True], []), FakeAgent()
    transfer = chunks.post()
    transfer.prepare = second.prepare
    transfer.advance()
    assert (chunks.agent.posted, second.posted) == (chunks.chunks[:2], chunks.chunks[2:])
    assert chunks.is_over(State.DONE)
    assert not second.held


@pytest.mark.parametrize("runs_one", [False, True])
def test_transfer_of_which_a_chunk_cannot_be_prepared_is_failed_once_none_runs(
    runs_one: bool,
) -> None:
    chunks = Chunks([False, True], [False, False, True], [])
    chunks.agent.gone = None if runs_one else GONE
    transfer = chunks.post()
    if runs_one:
        chunks.agent.gone = GONE
        for _ in range(2):
            transfer.advance()
        assert (transfer.drained, transfer.status.state) == (True, State.FAILING)
        transfer.release()
        transfer.settle()
    assert chunks.is_over(State.FAILED, "gone")


def test_transfer_failed_by_disconnect_stays_failed() -> None:
    chunks = Chunks([False, True])
    transfer: Any = chunks.post()
    transfer.fail(PeerLostError("disconnected"))
    transfer.advance()
    transfer.settle()
    assert chunks.is_over(State.FAILED, "disconnected")
