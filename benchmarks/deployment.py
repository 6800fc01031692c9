"""Any number of producers behind one socket: what they publish, and that they live.

One process answers for all of them, so that it costs the one that is measured nothing. Names are
answered for that begin with ``prefill``.
"""

from __future__ import annotations

import threading

import engines
import zmq
from engines import Shape

from kvferry.core.layout import Layout
from kvferry.core.messages import PayloadRequest, Payloads, Ping, Pong, decode_request, encode

INCARNATION = 5


class Deployment:
    """The producers. Made in a process of its own (``side.Side``)."""

    def __init__(self, layers: int = 1, blocks: int = 20_000, tp: int = 1) -> None:
        self._layouts: list[Layout] = engines.engine(Shape(tp=tp), layers, blocks)
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self._serve, daemon=True).start()

    def port(self) -> int:
        """Where all of them are."""
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
