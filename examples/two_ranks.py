"""Hand requests over between two engines of two ranks each, with schedulers of their own.

    python examples/two_ranks.py

There is no model: both engines are in this process, and each rank has its cache in a numpy array.
The model would have one layer of 4 heads, of which each rank has 2. The caches of the two engines
differ: prefill has pages of 16 tokens and keeps the tokens of a head together, decode has pages of
32 tokens and keeps the heads of a token together. Neither cache has room for all requests at once.

Read ``main`` first, which is the router, then ``Engine``, and the ``step`` of either engine. With
``RANKS = 1``, this is how engines of one rank use kvferry. Between processes or hosts only one
thing is different: tickets have to be sent. ``msgspec.json.encode(ticket)`` is the text to send,
and ``msgspec.json.decode(text, type=Ticket)`` the ticket.
"""

from collections import deque
from typing import Any

import numpy as np

from kvferry import KVFerryError, LocalEngine, Ticket, paged_layout

RANKS, HEADS, ELEMENTS, PAGES = 2, 4, 64, 16
HEADS_OF = [(HEADS * rank // RANKS, HEADS * (rank + 1) // RANKS) for rank in range(RANKS)]
"""The first head of each rank, and the one after its last."""
PROMPTS = {f"request-{n}": list(range(1000 * n, 1000 * n + 30 * n)) for n in range(1, 7)}
"""The token ids of each request, which both engines get with the request."""


def main() -> None:
    """Pass every request to prefill, and its ticket on to decode; compare what decode has got."""
    prefill, decode = Prefill(), Decode()
    with prefill.ranks, decode.ranks:
        prefill.waiting.extend(PROMPTS)
        while len(decode.loaded) < len(PROMPTS):
            decode.waiting.extend(prefill.step())
            decode.step()
    right = [np.array_equal(decode.loaded[name], computed(name)) for name in PROMPTS]
    print(f"{sum(right)} of {len(PROMPTS)} requests have the bytes that prefill computed")
    if not all(right):
        raise SystemExit(1)


def computed(request: str) -> np.ndarray:
    """Return what a model would compute for a prompt, as (token, head, element)."""
    prompt = PROMPTS[request]
    return np.random.default_rng(prompt).random((len(prompt), HEADS, ELEMENTS), dtype=np.float32)


class Engine:
    """What both engines have: a cache on each rank, free pages, and requests that wait for some.

    A page has the same id on all ranks, each of which has its own heads of the page's tokens.
    """

    def __init__(self, name: str, block: int, dims: tuple[str, ...]) -> None:
        """Describe how the caches lie in memory, and start to serve them to other engines.

        A layout is all that another engine has to know to find any token's bytes. Engines match the
        tensors by name, so the name is the same on both. The driver moves the bytes: ``loopback``
        reads the memory of processes on this host. ``LocalEngine.start`` is for CPU memory; on
        GPUs, make an ``Endpoint`` for each rank, and a ``LocalEngine`` of these.
        """
        self.block = block
        self.caches, layouts = [], []
        for first, last in HEADS_OF:
            sizes = {"page": PAGES, "token": block, "head": last - first, "element": ELEMENTS}
            memory = np.zeros([sizes[each] for each in dims], dtype=np.float32)
            layouts.append(paged_layout({"layers.0": memory}, dims, heads=(first, last)))
            # The same memory, seen as (page, token, head, element).
            self.caches.append(np.moveaxis(memory, dims.index("token"), 1))
        self.ranks = LocalEngine.start(name, layouts, driver="loopback")
        self.waiting: deque[Any] = deque()
        self.free = list(range(1, PAGES))  # the id 0 stands for no page
        self.pages: dict[str, list[int]] = {}

    def has_pages_for(self, request: str) -> bool:
        """Give a request the pages that it needs, if so many are free; return whether they are."""
        needed = -(-len(PROMPTS[request]) // self.block)
        if needed > len(self.free):
            return False
        self.pages[request], self.free = self.free[:needed], self.free[needed:]
        return True


class Prefill(Engine):
    """Computes requests, whose names wait, and makes a ticket for each."""

    def __init__(self) -> None:
        """Start the engine."""
        super().__init__("prefill", 16, ("page", "head", "token", "element"))

    def step(self) -> list[tuple[str, Ticket]]:
        """Reuse pages that were read, compute what has room, and return the new tickets.

        A ticket says which pages a request has, on which engine, and for which prompt. Its pages
        are held until decode has read them on every rank, or their lease ends.
        """
        for request in self.ranks.results().sent:
            self.free += self.pages.pop(request)
        tickets = []
        while self.waiting and self.has_pages_for(self.waiting[0]):
            request = self.waiting.popleft()
            if not self.ranks.begin_prefill(request):
                raise SystemExit("too many requests are held: decode this one here")
            pages = self.pages[request]
            self.write(pages, computed(request))
            ticket = self.ranks.finish_prefill(request, PROMPTS[request], pages)
            tickets.append((request, ticket))
        return tickets

    def write(self, pages: list[int], values: np.ndarray) -> None:
        """Write a request's cache into its pages, on each rank the heads that it has."""
        padded = np.zeros((len(pages) * self.block, HEADS, ELEMENTS), dtype=np.float32)
        padded[: len(values)] = values
        for cache, (first, last) in zip(self.caches, HEADS_OF, strict=True):
            cache[pages] = padded[:, first:last].reshape(len(pages), self.block, -1, ELEMENTS)


class Decode(Engine):
    """Loads requests, which wait with their tickets."""

    def __init__(self) -> None:
        """Start the engine."""
        super().__init__("decode", 32, ("page", "token", "head", "element"))
        self.loaded: dict[str, np.ndarray] = {}

    def step(self) -> None:
        """Begin the loads that have room, and take the caches of those that have ended.

        With its first ticket from an engine, decode does a handshake with that engine, and each
        rank makes a plan: which bytes to read from which rank. Prefill does nothing for the reads.

        After every read, decode checks that the pages were held until the read had ended. If not,
        the load fails: a real engine computes that prompt itself, and never decodes other bytes.
        """
        while self.waiting and self.has_pages_for(self.waiting[0][0]):
            request, ticket = self.waiting.popleft()
            self.ranks.begin_load(request, ticket, PROMPTS[request], self.pages[request])
        results = self.ranks.results(timeout=0.1)  # a real engine would decode meanwhile
        for error in results.failed.values():
            raise error
        for load in results.loads:
            print(f"{load.request}: {load.nbytes} bytes in {load.copies} copies on one rank")
        for request in results.received:
            pages = self.pages.pop(request)
            parts = [cache[pages].reshape(-1, cache.shape[2], ELEMENTS) for cache in self.caches]
            self.loaded[request] = np.concatenate(parts, axis=1)[: len(PROMPTS[request])]
            self.free += pages


if __name__ == "__main__":
    try:
        main()
    except KVFerryError as error:  # its text says what to change
        raise SystemExit(str(error)) from error
