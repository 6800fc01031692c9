"""A side channel that answers as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import zmq

from kvferry.core.side_channel_messages import decode_request


class SideChannel:
    """Answer requests in a thread until ``close``.

    Args:
        answer: returns the answer to a request of a client; ``None`` for none.
    """

    def __init__(self, answer: Callable[[bytes, Any], bytes | None]) -> None:
        self._answer = answer
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End, as the side channel of an engine that is killed. May be called twice."""
        self._is_over.set()
        self._thread.join()
        self._context.destroy(0)

    def _serve(self) -> None:
        while not self._is_over.is_set():
            if self._socket.poll(5):
                client, *_, message = self._socket.recv_multipart()
                answer = self._answer(client, decode_request(message))
                if answer is not None:
                    self._socket.send_multipart([client, answer])
