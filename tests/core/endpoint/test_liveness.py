"""Liveness checks between real endpoints: producers that die, return or are not used."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import PeerLostError
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually

OPTIONS = EndpointOptions(liveness_interval=5.0, liveness_misses=3)
"""A closed side channel is noticed long before the next ping is due."""


def start_load_waiting_for_device(prefill: Engine, decode: Engine) -> None:
    """Start a load that reads nothing yet, so only a liveness check can fail it."""
    ticket = prefill.serve_later("p-1", [1], 4)
    decode.pull("d-1", ticket, [2])


def wait_for_connection(driver: RecordingTransport) -> None:
    eventually(lambda: driver.open_connections == 1, "the producer is connected")


def test_a_closed_side_channel_fails_loads_and_releases_the_connection(
    prefill: Engine, driver: RecordingTransport
) -> None:
    with Engine("decode", options=OPTIONS, transport=lambda: driver) as decode:
        start_load_waiting_for_device(prefill, decode)
        wait_for_connection(driver)
        prefill.server.close()
        error = decode.error("d-1")
        assert isinstance(error, PeerLostError)
        assert "missed 3 of 3 pings" in str(error)
        eventually(lambda: driver.open_connections == 0, "the connection is released")


def test_the_thread_that_pings_ends_with_the_endpoint() -> None:
    def threads() -> set[threading.Thread]:
        return {
            thread for thread in threading.enumerate() if thread.name == "kvferry-side-channels"
        }

    before = threads()
    with Engine("prefill") as prefill, Engine("decode") as decode:
        assert decode.load("d-1", prefill.serve("p-1", [1], 4), [3]) is None
        assert len(threads()) == 1
    eventually(lambda: threads() <= before, "the thread ends")


@pytest.mark.parametrize("name", ["prefill", "other"])
def test_an_engine_that_takes_the_address_is_another_producer(
    prefill: Engine, driver: RecordingTransport, name: str
) -> None:
    """Also one of the same name: the engine was restarted."""
    with Engine("decode", options=OPTIONS, transport=lambda: driver) as decode:
        start_load_waiting_for_device(prefill, decode)
        wait_for_connection(driver)
        prefill.server.close()
        with Engine(name, port=prefill.server.port) as successor:
            error = decode.error("d-1")
            assert isinstance(error, PeerLostError)
            assert any(word in str(error) for word in ("missed", "restarted", "does not serve"))
            assert decode.load("d-2", successor.serve("p-1", [1], 4), [2]) is None


def test_a_side_channel_that_comes_back_in_time_is_the_same_producer(
    prefill: Engine, driver: RecordingTransport
) -> None:
    """As after a network failure that its process survives."""
    options = EndpointOptions(liveness_interval=5.0, liveness_misses=1000)
    with Engine("decode", options=options, transport=lambda: driver) as decode:
        start_load_waiting_for_device(prefill, decode)
        wait_for_connection(driver)
        prefill.server.close()
        with prefill.side_channel(port=prefill.server.port):
            assert not decode.endpoint.wait(0.3)
            prefill.step()
            assert decode.error("d-1") is None


def test_an_unused_producer_is_released_and_connected_again(
    clock: Clock, driver: RecordingTransport, producer_transport: RecordingTransport
) -> None:
    options = EndpointOptions(
        engine_ttl=100.0, load_timeout=1000.0, liveness_interval=0.05, liveness_misses=1000
    )
    with (
        Engine("prefill", transport=lambda: producer_transport, clock=clock) as prefill,
        Engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        assert decode.load("d-1", prefill.serve("p-1", [1], 4), [2]) is None
        clock.skip(90.0)
        assert decode.load("d-2", prefill.serve("p-2", [1], 4), [2]) is None
        assert driver.disconnected == set()
        prefill.released("p-2")  # so that later notifications are renewals
        clock.skip(90.0)
        waiting = prefill.serve("p-3", [1], 4)
        producer_transport.received.clear()
        decode.prepare(waiting)
        eventually(lambda: bool(producer_transport.received), "the hold is renewed")
        clock.skip(20.0)
        assert decode.load("d-3", waiting, [2]) is None
        assert driver.disconnected == set()
        decode.directory.end(waiting.request)  # which was prepared
        clock.skip(100.0)
        eventually(lambda: driver.open_connections == 0, "the connection is released")
        assert decode.load("d-4", prefill.serve("p-4", [1], 4), [2]) is None


def test_handshakes_with_a_silent_host_delay_no_other_load(prefill: Engine) -> None:
    options = EndpointOptions(handshake_timeout=30.0)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=512) as silent,
        Engine("decode", options=options) as decode,
    ):
        good, port = prefill.serve("p-1", [1], 4), silent.getsockname()[1]
        for number in range(50):
            decode.prepare(replace(good, engine=f"silent-{number}", port=port))
        assert decode.load("d-1", good, [2]) is None
