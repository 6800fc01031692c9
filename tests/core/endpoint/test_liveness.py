"""Producers that die, fall silent, come back or are not needed: between real endpoints."""

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
from kvferry.core.messages import encode
from tests.core.endpoint.engines import Clock, Engine, Watched, engine, eventually

QUICK = EndpointOptions(liveness_interval=5.0, liveness_misses=3)
"""What is closed is noticed long before the next ping is due."""


def waits_for_the_device(prefill: Engine, decode: Engine) -> None:
    """A load that can end by nothing that its transfers tell it."""
    prefill.compute("p-1", [1], 4)
    ticket = prefill.finish("p-1", [1], 4, computed=False, order=False)
    decode.pull("d-1", ticket, [2])


def connected(driver: Watched) -> None:
    eventually(lambda: driver.links == 1, "the producer is connected")


def test_a_dead_side_channel_fails_loads_and_releases_connections() -> None:
    driver = Watched()
    with (
        engine("prefill") as prefill,
        engine("decode", options=QUICK, transport=lambda: driver) as decode,
    ):
        waits_for_the_device(prefill, decode)
        connected(driver)
        prefill.server.close()
        error = decode.outcome("d-1").failed[RequestId("d-1")]
        assert isinstance(error, PeerLostError)
        assert "missed 3 of 3 pings" in str(error)
        eventually(lambda: driver.links == 0, "the connection is released")


def test_an_idle_connection_to_a_dead_producer_is_released_too() -> None:
    driver = Watched()
    with (
        engine("prefill") as prefill,
        engine("decode", options=QUICK, transport=lambda: driver) as decode,
    ):
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert not decode.outcome("d-1").failed
        assert driver.links == 1
        prefill.server.close()
        eventually(lambda: driver.links == 0, "the connection is released")


def test_a_producer_that_lives_is_left_alone() -> None:
    driver = Watched()
    options = EndpointOptions(liveness_interval=0.02, liveness_misses=500)
    with (
        engine("prefill") as prefill,
        engine("decode", options=options, transport=lambda: driver) as decode,
    ):
        waits_for_the_device(prefill, decode)
        assert not decode.ranks[0].endpoint.wait(0.5)
        prefill.step()
        assert not decode.outcome("d-1").failed
        assert driver.links == 1


def test_nobody_is_watched_when_the_endpoint_is_closed() -> None:
    def watching() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "kvferry-liveness"}

    before = watching()
    with engine("prefill") as prefill, engine("decode") as decode:
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [3])
        assert not decode.outcome("d-1").failed
        assert len(watching() - before) == 1
    eventually(lambda: watching() <= before, "the watch ends")


def test_another_start_at_the_same_address_is_another_producer() -> None:
    driver = Watched()
    with (
        engine("prefill") as prefill,
        engine("decode", options=QUICK, transport=lambda: driver) as decode,
    ):
        waits_for_the_device(prefill, decode)
        connected(driver)
        prefill.server.close()
        with engine("prefill", port=prefill.server.port) as successor:
            error = decode.outcome("d-1").failed[RequestId("d-1")]
            assert isinstance(error, PeerLostError)
            assert "missed" in str(error) or "restarted" in str(error)
            decode.pull("d-2", successor.serve("p-1", [1], 4), [2])
            assert not decode.outcome("d-2").failed


def test_an_address_that_another_engine_took_over() -> None:
    driver = Watched()
    with (
        engine("prefill") as prefill,
        engine("decode", options=QUICK, transport=lambda: driver) as decode,
    ):
        waits_for_the_device(prefill, decode)
        connected(driver)
        prefill.server.close()
        with engine("other", port=prefill.server.port):
            assert isinstance(decode.outcome("d-1").failed[RequestId("d-1")], PeerLostError)


def test_a_side_channel_that_comes_back_in_time_is_the_same_producer() -> None:
    """Its connections broke, say, and its process lives."""
    options = EndpointOptions(liveness_interval=5.0, liveness_misses=1000)
    driver = Watched()
    with (
        engine("prefill") as prefill,
        engine("decode", options=options, transport=lambda: driver) as decode,
    ):
        waits_for_the_device(prefill, decode)
        connected(driver)
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


def test_a_producer_that_is_not_used_is_let_go_of_and_reached_again() -> None:
    clock, driver, theirs = Clock(), Watched(), Watched()
    options = EndpointOptions(engine_ttl=100.0, load_timeout=1000.0)
    with (
        engine("prefill", transport=lambda: theirs, clock=clock) as prefill,
        engine("decode", options=options, transport=lambda: driver, clock=clock) as decode,
    ):
        decode.pull("d-1", prefill.serve("p-1", [1], 4), [2])
        assert not decode.outcome("d-1").failed
        clock.skip(90.0)
        decode.pull("d-2", prefill.serve("p-2", [1], 4), [2])
        assert not decode.outcome("d-2").failed
        assert driver.disconnected == set()
        prefill.released("p-2")  # what is heard from here on is no "done"
        clock.skip(90.0)
        waiting = prefill.serve("p-3", [1], 4)
        theirs.heard.clear()
        decode.prepare(waiting)
        eventually(lambda: bool(theirs.heard), "it is renewed")
        clock.skip(20.0)
        decode.pull("d-3", waiting, [2])
        assert not decode.outcome("d-3").failed
        assert driver.disconnected == set()
        clock.skip(100.0)
        eventually(lambda: driver.links == 0, "the connection is released")
        decode.pull("d-4", prefill.serve("p-4", [1], 4), [2])
        assert not decode.outcome("d-4").failed


@pytest.fixture
def mute() -> Iterator[int]:
    """The port of a host that takes every connection, and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        listener.settimeout(0.05)
        taken, ended = [], threading.Event()

        def take() -> None:
            while not ended.is_set():
                try:
                    taken.append(listener.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=take)
        thread.start()
        yield listener.getsockname()[1]
        ended.set()
        thread.join()
        for connection in taken:
            connection.close()


def test_a_handshake_with_a_mute_host_delays_nobody(mute: int) -> None:

    options = EndpointOptions(handshake_timeout=30.0)
    with engine("prefill") as prefill, engine("decode", options=options) as decode:
        good = prefill.serve("p-1", [1], 4)
        for number in range(50):
            decode.prepare(replace(good, engine=f"mute-{number}", port=mute))
        decode.pull("d-1", good, [2])
        assert not decode.outcome("d-1").failed


def test_a_producer_that_was_not_there_yet_is_used_when_it_comes() -> None:
    with engine("prefill") as first, engine("decode", options=QUICK) as decode:
        port = first.server.port
        late = first.serve("p-0", [1], 4)
        first.server.close()
        for number in range(3):
            decode.pull(f"d-{number}", late, [2])
            failed = decode.outcome(f"d-{number}").failed
            assert isinstance(failed[RequestId(f"d-{number}")], HandshakeError)
        with engine("prefill", port=port) as prefill:
            decode.pull("d-9", prefill.serve("p-1", [1], 4), [2])
            assert not decode.outcome("d-9").failed
