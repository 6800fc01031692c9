"""Hand one request over from a prefill engine to a decode engine, without a model.

    python examples/two_endpoints.py

Two engines in one process, each with a cache of its own in a numpy array. They agree about the
model (its one layer has 4 heads of 64 elements) and about nothing else: one has pages of 16 tokens
and keeps the tokens of a head together, the other has pages of 32 and keeps the heads of a token
together.

Read ``main`` first, which has the steps in their order, then what each step does. Between processes
or hosts nothing changes but the ticket, which has to travel: ``msgspec.json.encode(ticket)`` makes
text of it, ``msgspec.json.decode(text, type=Ticket)`` makes a ticket of the text.
"""

import numpy as np

from kvferry import KVFerryError, Results, SingleRankEngine, Ticket, paged_layout

PAGES, HEADS, ELEMENTS = 32, 4, 64

PROMPT = list(range(100))
"""The token ids of the request; both engines get them from whoever sent it."""

PREFILL_PAGES = [1, 2, 3, 4, 5, 6, 7]
"""100 tokens in pages of 16. Page 0 is never used: it stands for no page."""

DECODE_PAGES = [5, 3, 8, 1]
"""100 tokens in pages of 32, wherever there was room."""


def main() -> None:
    """Go through the life of one request, from prefill to the release of its pages."""
    prefill_cache = np.zeros((PAGES, HEADS, 16, ELEMENTS), dtype=np.float32)
    decode_cache = np.zeros((PAGES, 32, HEADS, ELEMENTS), dtype=np.float32)
    with (
        start_prefill_engine(prefill_cache) as prefill,
        start_decode_engine(decode_cache) as decode,
    ):
        ticket = compute(prefill, prefill_cache)
        load(decode, ticket)
        compare(prefill_cache, decode_cache)
        release(prefill)
        load_again(decode, ticket)


def start_prefill_engine(cache: np.ndarray) -> SingleRankEngine:
    """Step 1: say how the cache lies in memory, and start to serve it.

    A layout is all that another engine has to know to find any token's bytes. The field's name is
    what the two engines match by, so it has to be the same on both. The engine listens on a side
    channel, where others ask for its layout before the first request.
    """
    layout = paged_layout({"layers.0": cache}, dims=("page", "head", "token", "element"))
    return SingleRankEngine("prefill", layout, driver="loopback")


def start_decode_engine(cache: np.ndarray) -> SingleRankEngine:
    """Step 2: the same for the other engine, whose cache has the dimensions in another order.

    The driver is what moves bytes: both engines need the same one. ``loopback`` reads the memory of
    other processes on this host; ``kvferry drivers`` lists what else is installed.
    """
    layout = paged_layout({"layers.0": cache}, dims=("page", "token", "head", "element"))
    return SingleRankEngine("decode", layout, driver="loopback")


def compute(prefill: SingleRankEngine, cache: np.ndarray) -> Ticket:
    """Step 3: compute the request, and make a ticket for it.

    The ticket says which pages there are, where, and for which prompt. From now on the pages must
    stay as they are: they are held until somebody has read them or the lease runs out.
    """
    if not prefill.begin_prefill("prefill-1"):
        raise SystemExit("there is no room for one more held request")
    # A model would run here. Random numbers are as good: nobody could guess them.
    cache[PREFILL_PAGES] = np.random.default_rng(0).random(cache[PREFILL_PAGES].shape)
    return prefill.finish_prefill("prefill-1", PROMPT, PREFILL_PAGES)


def load(decode: SingleRankEngine, ticket: Ticket) -> None:
    """Step 4: read the pages into the other engine's cache.

    ``load`` returns at once. The engine goes on with its other requests and looks now and then what
    is over; here there is nothing else to do, so we wait. With the first ticket from an engine, the
    two shake hands and a plan is made: who reads which bytes from where. The prefill engine does
    nothing for the read itself.
    """
    decode.load("decode-1", ticket, PROMPT, DECODE_PAGES)
    results = wait_for_load(decode)
    for error in results.failed.values():
        raise error
    [figures] = results.loads
    print(f"{figures.nbytes} bytes in {figures.copies} copies, {figures.seconds * 1e3:.1f} ms")


def compare(prefill_cache: np.ndarray, decode_cache: np.ndarray) -> None:
    """Step 5: look whether decode's pages have what prefill computed, token by token.

    Both caches are brought into the form (token, head, element) first.
    """
    computed = prefill_cache[PREFILL_PAGES].swapaxes(1, 2).reshape(-1, HEADS, ELEMENTS)
    loaded = decode_cache[DECODE_PAGES].reshape(-1, HEADS, ELEMENTS)
    tokens = len(PROMPT)
    print("equal" if np.array_equal(computed[:tokens], loaded[:tokens]) else "NOT EQUAL")


def release(prefill: SingleRankEngine) -> None:
    """Step 6: learn that the pages were read, so that they can be given to other requests."""
    while not (sent := prefill.results(timeout=1.0).sent):
        pass
    print(f"pages that may be given back now: those of {', '.join(sent)}")


def load_again(decode: SingleRankEngine, ticket: Ticket) -> None:
    """Step 7: see what becomes of a ticket whose pages are no longer held.

    After every read the engine checks that the pages were held to the end. Here they were not, so
    the load fails: the engine would compute the prompt itself, and never decode garbage.
    """
    decode.load("decode-2", ticket, PROMPT, DECODE_PAGES)
    [error] = wait_for_load(decode).failed.values()
    print(f"the ticket once more: {error}")


def wait_for_load(decode: SingleRankEngine) -> Results:
    """Return the results in which a load is over, whether it failed or not."""
    while not (results := decode.results(timeout=1.0)).received:
        pass
    return results


if __name__ == "__main__":
    try:
        main()
    except KVFerryError as error:  # whatever kvferry refuses says what to change
        raise SystemExit(str(error)) from error
