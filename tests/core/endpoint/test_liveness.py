"""Liveness checks between real endpoints: producers that die, return or are not used."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvferry.core.endpoint import EndpointOptions
from kvferry.core.errors import HandshakeError, PeerLostError
from kvferry.core.handshake import HandshakeServer
from kvferry.core.lifecycle.holds import RequestId
from kvferry.core.side_channel_messages import encode
from tests.core.endpoint.engines import Clock, Engine, RecordingTransport, eventually

OPTIONS = EndpointOptions(liveness_interval=5.0, liveness_misses=3)
"""A closed side channel is noticed long before the next ping is due."""


def start_load_waiting_for_device(prefill: Engine, decode: Engine) -> None:
    """Start a load that reads nothing yet, so only a liveness check can fail it."""
    prefill.compute("p-1", [1], 4)
    ticket = prefill.finish("p-1", [1], 4, computed=False, order=False)
    decode.pull("d-1", ticket, [2])


def wait_for_connection(driver: RecordingTransport) -> None:
    eventually(lambda: driver.open_connections == 1, "the producer is connected")


def test_a_closed_side_channel_fails_loads_and_releases_the_connection() -> None:
    driver = RecordingTransport()
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        start_load_waiting_for_device(prefill, decode)
        wait_for_connection(driver)
        prefill.server.close()
        error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, PeerLostError)
        assert "missed 3 of 3 pings" in str(error)
        eventually(lambda: driver.open_connections == 0, "the connection is released")


def test_an_idle_connection_to_a_dead_producer_is_released() -> None:
    driver = RecordingTransport()
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert not decode.outcome("d-1").failed
        assert driver.open_connections == 1
        prefill.server.close()
        eventually(lambda: driver.open_connections == 0, "the connection is released")


def test_a_live_producer_stays_connected() -> None:
    driver = RecordingTransport()
    options = EndpointOptions(liveness_interval=0.02, liveness_misses=500)
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=options, transport=lambda: driver) as decode,
    ):
        start_load_waiting_for_device(prefill, decode)
        assert not decode.ranks[0].endpoint.wait(0.5)
        prefill.step()
        assert not decode.outcome("d-1").failed
        assert driver.open_connections == 1


def test_the_thread_that_pings_ends_with_the_endpoint() -> None:
    def threads() -> set[threading.Thread]:
        return {
            thread for thread in threading.enumerate() if thread.name == "kvferry-side-channels"
        }

    before = threads()
    with Engine("prefill") as prefill, Engine("decode") as decode:
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [3])
        assert not decode.outcome("d-1").failed
        assert len(threads()) == 1
    eventually(lambda: threads() <= before, "the thread ends")


def test_a_restarted_engine_at_the_same_address_is_another_producer() -> None:
    driver = RecordingTransport()
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        start_load_waiting_for_device(prefill, decode)
        wait_for_connection(driver)
        prefill.server.close()
        with Engine("prefill", port=prefill.server.port) as successor:
            error = decode.outcome("d-1").failed[RequestId("d-1")]
            assert isinstance(error, PeerLostError)
            assert "missed" in str(error) or "restarted" in str(error)
            decode.pull("d-2", successor.serve("p-1", [1], 4), [2])
            assert not decode.outcome("d-2").failed


def test_a_producer_is_lost_if_another_engine_takes_its_address() -> None:
    driver = RecordingTransport()
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=OPTIONS, transport=lambda: driver) as decode,
    ):
        start_load_waiting_for_device(prefill, decode)
        wait_for_connection(driver)
        prefill.server.close()
        with Engine("other", port=prefill.server.port):
            assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], PeerLostError)


def test_a_side_channel_that_comes_back_in_time_is_the_same_producer() -> None:
    """As after a network failure that its process survives."""
    options = EndpointOptions(liveness_interval=5.0, liveness_misses=1000)
    driver = RecordingTransport()
    with (
        Engine("prefill") as prefill,
        Engine("decode", options=options, transport=lambda: driver) as decode,
    ):
        start_load_waiting_for_device(prefill, decode)
        wait_for_connection(driver)
        prefill.server.close()
        with HandshakeServer(
            [encode(rank.endpoint.payload) for rank in prefill.ranks],
            engine="prefill",
            incarnation=prefill.incarnation,
            port=prefill.server.port,
        ):
            assert not decode.ranks[0].endpoint.wait(0.3)
            prefill.step()
            assert not decode.outcome("d-1").failed


def test_an_unused_producer_is_released_and_connected_again() -> None:
    clock, driver, producer_transport = Clock(), RecordingTransport(), RecordingTransport()
    options = EndpointOptions(engine_ttl=100.0, load_timeout=1000.0)
    with (
        Engine("prefill", transport=lambda: producer_transport, clock=clock) as prefill,
        Engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert not decode.outcome("d-1").failed
        clock.skip(90.0)
        decode.pull("d-2", prefill.serve("p-2", [1], 4), [2])
        assert not decode.outcome("d-2").failed
        assert driver.disconnected == set()
        prefill.released("p-2")  # so that later notifications are renewals
        clock.skip(90.0)
        waiting = prefill.serve("p-3", [1], 4)
        producer_transport.received.clear()
        decode.prepare(waiting)
        eventually(lambda: bool(producer_transport.received), "the hold is renewed")
        clock.skip(20.0)
        decode.pull("d-3", waiting, [2])
        assert not decode.outcome("d-3").failed
        assert driver.disconnected == set()
        clock.skip(100.0)
        eventually(lambda: driver.open_connections == 0, "the connection is released")
        decode.pull("d-4", prefill.serve("p-4", [1], 4), [2])
        assert not decode.outcome("d-4").failed


@pytest.fixture
def silent_host() -> Iterator[int]:
    """Accept connections without ever replying; yield the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        listener.settimeout(0.05)
        connections, stop = [], threading.Event()

        def accept() -> None:
            while not stop.is_set():
                try:
                    connections.append(listener.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        stop.set()
        thread.join()
        for connection in connections:
            connection.close()


def test_handshakes_with_a_silent_host_delay_no_other_load(silent_host: int) -> None:
    options = EndpointOptions(handshake_timeout=30.0)
    with Engine("prefill") as prefill, Engine("decode", options=options) as decode:
        good = prefill.serve("p-1", [1], 4)
        for number in range(50):
            decode.prepare(replace(good, engine=f"silent-{number}", port=silent_host))
        decode.pull("d-1", good, [2])
        assert not decode.outcome("d-1").failed


def test_a_producer_that_was_unreachable_is_used_once_it_listens() -> None:
    with Engine("prefill") as first, Engine("decode", options=OPTIONS) as decode:
        port = first.server.port
        ticket = first.serve("p-0", [1], 4)
        first.server.close()
        for number in range(3):
            decode.pull(f"d-{number}", ticket, [2])
            failed = decode.outcome(f"d-{number}").failed
            assert isinstance(failed[RequestId(f"d-{number}")], HandshakeError)
        with Engine("prefill", port=port) as prefill:
            decode.pull("d-9", prefill.serve("p-1", [1], 4), [2])
            assert not decode.outcome("d-9").failed
