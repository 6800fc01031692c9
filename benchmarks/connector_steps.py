"""What KVFerryConnector costs engine steps and requests: both halves, called as vLLM calls them."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from benchmarks import engines, harness, vllm_worker
from benchmarks.engines import Deployment, Shape
from benchmarks.harness import Row, WorkerProcess, row
from benchmarks.no_transport import WORD, NoTransport
from kvferry.core.endpoint import Endpoint, EndpointOptions, Identity
from kvferry.core.layout import Layout
from kvferry.core.lifecycle.holds import Hold, Incarnation
from kvferry.core.security import TicketSecrets
from kvferry.core.transport import Transport, registry
from kvferry.integrations.vllm.ticket_format import TicketParams
from tests.integrations.vllm.halves import blocks, request, step

LONG = 3600.0
SECRET = "KVFERRY_BENCHMARK_SECRET"
"""Signs the tickets of producers that are not there, and names itself."""


def ticket_format(
    engine: str, number: int, port: int, pages: Sequence[int], tokens: int
) -> TicketParams:
    """The ticket of a producer on this host, before it is signed."""
    hold = Hold(slot=number, generation=WORD >> 1)
    fields = engines.ticket_fields(engine, f"there-{number}", port, pages, hold, tokens=tokens)
    return TicketParams(**fields)


class Engine:
    """The scheduler's and the worker's connector of one rank.

    What describes vLLM's tensors and makes the driver is left out: it is over when steps begin.
    """

    def __init__(
        self,
        name: str,
        driver: str,
        layout: Layout,
        transport: Transport,
        *,
        slots: int,
        layers: int,
        verify_prompt: bool,
    ) -> None:
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvferry.integrations.vllm.connector import KVFerryConnector
        from kvferry.integrations.vllm.worker import FerryWorker

        os.environ[SECRET] = SECRET
        config = vllm_worker.config(layers)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVFerryConnector",
            kv_connector_module_path="kvferry.integrations.vllm",
            kv_role="kv_both",
            engine_id=name,
            kv_connector_extra_config={
                "driver": driver,
                "verify_prompt": verify_prompt,
                "kv_lease_duration": LONG,
                "ticket_secrets": [f"env:{SECRET}"],
            },
        )
        caches = vllm_worker.cache_config(layers, slots, engines.HEADS)
        with set_current_vllm_config(config):
            self.scheduler: Any = KVFerryConnector(config, KVConnectorRole.SCHEDULER, caches)
            self.worker: Any = KVFerryConnector(config, KVConnectorRole.WORKER, caches)
        self.endpoint = Endpoint(
            identity=Identity(engine=name, incarnation=Incarnation(len(name))),
            driver=driver,
            transport=transport,
            layout=layout,
            slots=slots,
            options=EndpointOptions(load_timeout=LONG),
            zero=lambda spans: None,
        )
        self.worker._worker = FerryWorker(self.endpoint, lambda: None)
        self.endpoint.join([self.endpoint.payload])

    def arrive(self, made: Any, ids: Sequence[int] = ()) -> None:
        """A request comes, and gets blocks unless it waits for them."""
        self.scheduler.on_new_request(made)
        tokens, _ = self.scheduler.get_num_new_matched_tokens(made, 0)
        if ids:
            self.scheduler.update_state_after_alloc(made, blocks(*ids), int(tokens))

    def finish(self, made: Any, ids: Sequence[int]) -> Any:
        """A request ends with its prompt computed; its ticket, if it gets one."""
        made.num_computed_tokens = made.num_prompt_tokens
        _, ticket = self.scheduler.request_finished_all_groups(made, (list(ids),))
        return ticket

    def step(self) -> Any:
        """A step, as vLLM's engine core and model runner do it; what the worker reported in it."""
        from vllm.v1.outputs import KVConnectorOutput

        scheduler, worker = self.scheduler, self.worker
        worker.bind_connector_metadata(scheduler.build_connector_meta(step()))
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        errors = worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        health = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            invalid_block_ids=errors,
            kv_connector_worker_meta=health,
        )
        scheduler.update_connector_output(output)
        scheduler.get_kv_connector_stats()
        scheduler.has_pending_push_work()
        return results

    def close(self) -> None:
        """Let go of everything."""
        self.worker.shutdown()
        self.scheduler.shutdown()


# Engine steps in which nothing happens.

CASES = {
    "held": ("requests held", (1, 100, 10_000)),
    "waiting": ("requests waiting", (1, 100, 10_000)),
    "loading": ("requests loading", (1, 10, 100)),
    "peers": ("producers known", (1, 100, 1_000)),
}
"""Requests that wait for somebody to read their pages, for blocks (each with a ticket whose hold is
renewed), or for reads that never end; and producers whose life is watched."""
SLOTS = 20_000
STEPS = 100  # in a row; their median is one measurement. Few, so that engines take turns often
REST_SECONDS = 2.0  # what a start has stirred up is over then


class Host:
    """A process for one engine after the other, in which something waits."""

    def __init__(self) -> None:
        harness.many_files()
        vllm_worker.quiet()
        self._engine: Engine | None = None

    def make(self, what: str, count: int, port: int) -> int:
        """Another engine with so many of ``CASES``; by how many bytes the process has grown."""
        if self._engine is not None:
            self._engine.close()
        vllm_worker.config(1)
        before = harness.resident()
        [layout] = engines.engine(Shape(), 1, SLOTS)
        transport = NoTransport(pending=what == "loading")
        self._engine = engine = Engine(
            "engine", "nixl", layout, transport, slots=SLOTS, layers=1, verify_prompt=False
        )
        for index in range(count):
            self._begin(engine, what, index, port)
        loads: Any = engine.endpoint._load_manager
        done: dict[str, Callable[[], bool]] = {
            "held": lambda: engine.endpoint.held == count,
            "waiting": lambda: len(loads._lease_renewal) == count,
            "peers": lambda: len(loads.peers._connected) == len(loads._lease_renewal) == count,
            "loading": lambda: len(engine.endpoint._calls.transfers._posted) == count,
        }
        harness.wait_until(
            lambda: engine.step() and done[what](), f"{count} {what}: it did not come to rest"
        )
        time.sleep(REST_SECONDS)
        return harness.resident() - before

    def steps(self) -> tuple[float, float]:
        """Some steps: CPU seconds of the median one, and the share of a core that the connector's
        own threads took beside."""
        if self._engine is None:
            raise SystemExit("there is no engine yet")
        cpu = np.empty(STEPS)
        own, all_threads, start = time.thread_time(), time.process_time(), time.perf_counter()
        for index in range(STEPS):
            spent = time.thread_time()
            self._engine.step()
            cpu[index] = time.thread_time() - spent
            time.sleep(0.0005)
        seconds = time.perf_counter() - start
        beside = time.process_time() - all_threads - (time.thread_time() - own)
        return max(float(np.median(cpu)), 1e-6), max(beside / seconds, 1e-6)

    def _begin(self, engine: Engine, what: str, index: int, port: int) -> None:
        if what == "held":
            made = request(engines.BLOCK, {"do_remote_decode": True}, computed=0, name=f"r-{index}")
            engine.arrive(made, [1 + index])
            engine.step()
            engine.finish(made, [1 + index])
            return
        name = f"prefill-{index}" if what == "peers" else "prefill"
        ticket = ticket_format(name, index, port, [1 + index], engines.BLOCK)
        signed = ticket.params(TicketSecrets.of([SECRET]))
        made = request(engines.BLOCK, signed, computed=0, name=f"r-{index}")
        engine.arrive(made, [1 + index] * (what == "loading"))


def steps(quick: bool) -> Iterator[Row]:
    """Engines with few and with many requests take turns, each in a process of its own."""
    harness.need_vllm()
    with ExitStack() as stack:
        port = stack.enter_context(WorkerProcess(Deployment)).ask("port")
        hosts = [stack.enter_context(WorkerProcess(Host)) for _ in range(3)]
        for what, (name, counts) in CASES.items():
            harness.say(name)
            for host, count in zip(hosts, counts[: 2 if quick else 3], strict=False):
                host.begin("make", what, count, port)
            made = hosts[: 2 if quick else 3]
            sizes = [host.end() for host in made]
            found = harness.by_turns(
                [host.way("steps") for host in made], rounds=100, seconds=0.5 if quick else 6.0
            )
            for count, own in zip(counts, found, strict=False):
                yield from _rows(name, count, own, found[0], what)
            if what == "peers":
                grown = (sizes[-1] - sizes[0]) / (counts[len(made) - 1] - counts[0])
                section = "memory for each producer that is known"
                of, figure = f"{counts[0]} and {counts[len(made) - 1]:,} producers", max(grown, 1)
                yield row(section, "one layer", of, figure, figure, unit="KB")


def _rows(
    name: str, count: int, own: harness.Times, first: harness.Times, what: str
) -> Iterator[Row]:
    promised = "≤ 1.1" if count > 1 and what != "loading" else None
    for index, (section, unit, target) in enumerate(
        (
            (f"engine step, {name}", "µs CPU", promised),
            (f"beside, {name}", "% of a core", None),
        )
    ):
        figures, of = own[:, index], "the same with 1"
        others = first[:, index]
        yield row(section, f"{count:,}", of, figures, others, unit=unit, target=target)


# Requests.

LAYERS, REQUEST_SLOTS, TOKENS = 4, 512, 1024
HALVES = {"prefill": "prefill, both halves", "decode": "decode, both halves"}
WARM_UP = 20  # requests that are not counted: the first shakes hands, and the next fill caches


class Pair:
    """An engine that prefills and one that decodes, over loopback in this process.

    So nothing is copied between processes, and what is left is Python's.
    """

    def __init__(self) -> None:
        nbytes = engines.ELEMENT * 2 * engines.DIM * engines.HEADS * engines.BLOCK
        self._memory = [vllm_worker.room(nbytes * LAYERS * REQUEST_SLOTS) for _ in range(2)]
        self._numbers = itertools.count()
        self._spent = dict.fromkeys(HALVES.values(), 0.0)
        self._prefill, self._decode = (
            self._engine(name, ctypes.addressof(ctypes.c_char.from_buffer(memory)))
            for name, memory in zip(("prefill", "decode"), self._memory, strict=True)
        )

    def hand_over(self) -> dict[str, float]:
        """Hand over one request; CPU seconds by engine and thread."""
        prefill, decode = self._prefill, self._decode
        number, count = next(self._numbers), TOKENS // engines.BLOCK
        ids = [1 + (number * count + index) % (REQUEST_SLOTS - 1) for index in range(count)]
        self._spent, before = dict.fromkeys(HALVES.values(), 0.0), self._clocks()
        there = request(TOKENS, {"do_remote_decode": True}, computed=0, name=f"there-{number}")
        with self._engine_thread("prefill"):
            prefill.arrive(there, ids)
            prefill.step()
            ticket = prefill.finish(there, ids)
            prefill.step()
        here = request(TOKENS, ticket, computed=0, name=f"here-{number}")
        with self._engine_thread("decode"):
            decode.arrive(here, ids)
            decode.step()
            self._until(decode, here, "finished_recving")
        with self._engine_thread("prefill"):
            self._until(prefill, there, "finished_sending")
        with self._engine_thread("decode"):
            decode.scheduler.request_finished_all_groups(here, (ids,))
        after = self._clocks()
        return self._spent | {name: after[name] - before[name] for name in after}

    def close(self) -> None:
        """Let go of both engines."""
        self._prefill.close()
        self._decode.close()

    def _engine(self, name: str, address: int) -> Engine:
        heads = (0, engines.HEADS)
        made = Engine(
            name,
            "loopback",
            engines.rank_layout(Shape(), LAYERS, REQUEST_SLOTS, heads, address),
            registry.create("loopback"),
            slots=REQUEST_SLOTS,
            layers=LAYERS,
            verify_prompt=True,
        )
        made.scheduler.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): made.worker.get_handshake_metadata()}
        )
        made.step()
        return made

    def _clocks(self) -> dict[str, float]:
        found = {}
        for name, engine in (("prefill", self._prefill), ("decode", self._decode)):
            clock = time.pthread_getcpuclockid(engine.endpoint._thread.ident or 0)
            found[f"{name}, endpoint's thread"] = time.clock_gettime(clock)
        return found

    @contextmanager
    def _engine_thread(self, name: str) -> Iterator[None]:
        before = time.thread_time()
        yield
        self._spent[HALVES[name]] += time.thread_time() - before

    def _until(self, engine: Engine, made: Any, what: str) -> None:
        """Make steps until one reports the request; the scheduler half acts in steps only."""

        def reported() -> bool:
            engine.endpoint.wait(0.02)
            return made.request_id in (getattr(engine.step(), what) or ())

        harness.wait_until(reported, f"{made.request_id} was not in {what}", 5.0)


def request_profile(quick: bool) -> Iterator[Row]:
    """What one request costs in Python: CPU time of each engine's threads."""
    harness.need_vllm()
    vllm_worker.quiet()
    pair = Pair()
    found = [pair.hand_over() for _ in range(WARM_UP + (20 if quick else 400))][WARM_UP:]
    pair.close()
    times = {name: np.array([each[name] for each in found]) for name in sorted(found[0])}
    whole = sum(times.values())
    for name, own in {"all": whole, **times}.items():
        section = "what a request costs in Python"
        yield row(section, name, "all of it", own, whole, unit="µs CPU")
