"""``kvferry demo``: move a KV cache between two engines of different shape, without a model.

Everything but the model is real: the processes of a prefill engine, a decode engine in the process
of the command, their endpoints, side channel, tickets, holds and fences, and the driver. What
arrives is compared, byte for byte, with what must arrive.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection

from rich.console import Console

from kvferry.cli.demo import report
from kvferry.cli.demo.decode import COPY_ROUNDS, Decode
from kvferry.cli.demo.model import DemoError, requests_of, shape_of, with_room
from kvferry.cli.demo.pipes import ReleasedRequest, Spec, Started, prefill_processes, receive
from kvferry.core.errors import StaleError
from kvferry.core.lifecycle.holds import random_incarnation
from kvferry.core.lifecycle.ticket import Ticket
from kvferry.core.memory import CPU
from kvferry.core.transport import Transport
from kvferry.core.transport.registry import create
from kvferry.testing.engines import CacheShape

ENGINE = "prefill"
INTERRUPTED = 130
PREFILL, DECODE, UNLIKE_DECODE = "2/HND/16", "HND/16", "NHD/32"
"""The engines that are used if none is given."""
COPIES_IN_MEMORY = 3
"""Number of buffers of the cache's size: prefill's, decode's, and the target of local copies."""


def run(
    *,
    megabytes: int = 256,
    driver: str = "loopback",
    prefill: str | None = None,
    decode: str | None = None,
) -> int:
    """Run the demo, and print the results.

    If no engine is given, the cache is moved twice: between engines of like shape, then between
    engines of unlike shape.
    """
    console = Console()
    # The demo causes warnings of its endpoints on purpose, and prints the outcome itself.
    logging.getLogger("kvferry").addHandler(logging.NullHandler())
    decodes = (DECODE, UNLIKE_DECODE) if prefill is None and decode is None else (decode or DECODE,)
    try:
        source = shape_of(prefill or PREFILL)
        status = 0
        for shape in [shape_of(text, tp=1) for text in decodes]:
            status |= _run(console, megabytes * 10**6, driver, source, shape)
        return status
    except KeyboardInterrupt:
        console.print("Interrupted: all processes have been ended.")
        return INTERRUPTED


def _run(
    console: Console, nbytes: int, driver: str, prefill: CacheShape, decode: CacheShape
) -> int:
    """Start both engines, move the cache, and print the results."""
    _check_memory(nbytes)
    requests = tuple(requests_of(nbytes))
    spec = Spec(
        engine=ENGINE,
        incarnation=random_incarnation(),
        driver=driver,
        shape=with_room(prefill, requests),
        requests=requests,
        lease=60.0 + nbytes / 1e7,
    )
    transport = _transport(driver)
    report.pair(console, prefill, decode)
    with ExitStack() as stack:
        with report.step(console, "engines started"):
            pipe = stack.enter_context(prefill_processes(prefill.tp))
            pipe.send(spec)
            consumer = Decode(transport, driver, decode, spec.requests, spec.lease)
            stack.enter_context(consumer.engine)
            started = receive(pipe, Started)
        report.engines(console, prefill, decode, started)
        return _cross(console, pipe, spec, consumer)


def _cross(console: Console, pipe: Connection, spec: Spec, consumer: Decode) -> int:
    """Have the decode engine pull all requests, and print the results."""
    count, tokens = len(spec.requests), sum(request.tokens for request in spec.requests)
    title = f"prefill engine computed {tokens:,} tokens of {count} requests"
    with report.step(console, title, count) as advance:
        tickets = {request: _ticket(pipe, advance) for request in spec.requests}
    with report.step(console, "decode engine pulled them", count) as advance:
        pulled = consumer.pull(tickets, advance)
    with report.step(console, "every byte was compared with what it must be", count) as advance:
        wrong = consumer.wrong_bytes(advance)
    with report.step(console, f"the same bytes were copied by numpy, {COPY_ROUNDS} times"):
        local = consumer.local_rates(pulled)
    with report.step(console, "every hold was released, and a used ticket tried again"):
        receive(pipe, ReleasedRequest)
        refusal = consumer.pull_again(*next(iter(tickets.items())))
    pages = {
        request: (spec.shape.tp * len(ticket.pages[0]), len(consumer.pages[request]))
        for request, ticket in tickets.items()
    }
    report.requests(console, pulled, pages, wrong)
    report.used_ticket(console, refusal)
    report.rates(console, pulled, local, spec.shape, consumer.engine.shape)
    return int(any(wrong.values()) or not isinstance(refusal, StaleError))


def _ticket(pipe: Connection, advance: report.Advance) -> Ticket:
    """Return the next ticket from the prefill engine, and advance the progress bar."""
    ticket = receive(pipe, Ticket)
    advance()
    return ticket


def _transport(driver: str) -> Transport:
    """Return a new transport of a driver; the driver must be able to read CPU memory."""
    transport = create(driver)
    can = transport.capabilities
    if CPU in can.memory:
        return transport
    transport.close()
    raise DemoError(
        f"driver {driver!r} reaches {', '.join(sorted(can.memory)) or 'no'} memory; the demo reads "
        f"{CPU} memory: choose another with --driver (kvferry drivers lists them)"
    )


def _check_memory(nbytes: int) -> None:
    """Refuse to move a cache of ``nbytes`` for which this machine has not enough free memory."""
    needed = nbytes * COPIES_IN_MEMORY
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError), open("/proc/meminfo") as lines:  # counts reclaimable caches as free
        found = next((line for line in lines if line.startswith("MemAvailable:")), None)
        available = int(found.split()[1]) * 1024 if found else available
    if needed > available:
        raise DemoError(
            f"the demo would need {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB "
            f"are available: choose --megabytes below {available // COPIES_IN_MEMORY // 10**6}"
        )
