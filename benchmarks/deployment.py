"""Any number of producers behind one socket, which answers for what they publish and for pings.

One process answers for all producers whose names begin with ``prefill``, so that they take no time
of the process that is measured.
"""

from __future__ import annotations

import threading

import engines
import zmq
from engines import Shape

from kvferry.core.layout import Layout
from kvferry.core.side_channel_messages import (
    PayloadRequest,
    Payloads,
    Ping,
    Pong,
    decode_request,
    encode,
)

INCARNATION = 5


class Deployment:
    """The producers, made in a process of its own (``worker_process.WorkerProcess``)."""

    def __init__(self, layers: int = 1, blocks: int = 20_000, tp: int = 1) -> None:
        self._layouts: list[Layout] = engines.engine(Shape(tp=tp), layers, blocks)
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self._serve, daemon=True).start()

    def port(self) -> int:
        """Return the port of all producers."""
        return self._port

    def _serve(self) -> None:
        while True:
            *envelope, message = self._socket.recv_multipart()
            request = decode_request(message)
            if isinstance(request, PayloadRequest):
                reply = encode(Payloads(ranks=engines.payloads(self._layouts, request.engine)))
            elif isinstance(request, Ping):
                reply = encode(Pong(incarnation=INCARNATION))
            else:
                continue
            self._socket.send_multipart([*envelope, reply])
