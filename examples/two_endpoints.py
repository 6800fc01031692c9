"""Hand one request over from a prefill engine to a decode engine, without a model.

    python examples/two_endpoints.py

There are two engines in one process, each with a cache of its own in a numpy array. They have the
same model (its one layer has 4 heads of 64 elements), but their caches differ: prefill has pages of
16 tokens and keeps the tokens of a head together, decode has pages of 32 tokens and keeps the heads
of a token together.

Read ``main`` first, which has the steps in their order, then the function of each step. Between
processes or hosts only one thing is different: the ticket has to be sent.
``msgspec.json.encode(ticket)`` turns it into text, ``msgspec.json.decode(text, type=Ticket)`` turns
the text into a ticket.
"""

import numpy as np

from kvferry import KVFerryError, Results, SingleRankEngine, Ticket, paged_layout

PAGES, HEADS, ELEMENTS = 32, 4, 64

PROMPT = list(range(100))
"""The token ids of the request, which both engines get with the request."""

PREFILL_PAGES = [1, 2, 3, 4, 5, 6, 7]
"""The ids of prefill's pages for the request: 100 tokens in pages of 16. The id 0 is never used,
because it stands for no page."""

DECODE_PAGES = [5, 3, 8, 1]
"""The ids of decode's pages for the request: 100 tokens in pages of 32, in any free pages."""


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
    """Step 1: describe how the cache lies in memory, and start to serve it to other engines.

    A layout is all that another engine has to know to find any token's bytes. The two engines match
    their fields by name, so the name has to be the same on both. The engine listens on a side
    channel, on which other engines ask for its layout before they first read from it.

    Args:
        cache: the cache, in which each page has the dimensions (head, token, element).
    """
    layout = paged_layout({"layers.0": cache}, dims=("page", "head", "token", "element"))
    return SingleRankEngine("prefill", layout, driver="loopback")


def start_decode_engine(cache: np.ndarray) -> SingleRankEngine:
    """Step 2: do the same for the decode engine, whose cache has its dimensions in another order.

    The driver moves the bytes: both engines need the same driver. ``loopback`` reads the memory of
    other processes on this host; ``kvferry drivers`` lists the installed drivers.

    Args:
        cache: the cache, in which each page has the dimensions (token, head, element).
    """
    layout = paged_layout({"layers.0": cache}, dims=("page", "token", "head", "element"))
    return SingleRankEngine("decode", layout, driver="loopback")


def compute(prefill: SingleRankEngine, cache: np.ndarray) -> Ticket:
    """Step 3: compute the request's cache, and return a ticket for it.

    The ticket says which pages the request has, on which engine, and for which prompt. From now on
    the pages must not be changed: they are held until an engine has read them or their lease ends.

    Args:
        prefill: the prefill engine.
        cache: the prefill engine's cache.
    """
    if not prefill.begin_prefill("prefill-1"):
        raise SystemExit("there is no room for one more held request")
    # A model would run here. Random numbers serve as well: decode can only have them from prefill.
    cache[PREFILL_PAGES] = np.random.default_rng(0).random(cache[PREFILL_PAGES].shape)
    return prefill.finish_prefill("prefill-1", PROMPT, PREFILL_PAGES)


def load(decode: SingleRankEngine, ticket: Ticket) -> None:
    """Step 4: read the pages into the decode engine's cache.

    ``SingleRankEngine.load`` returns at once. A real engine would go on with its other requests,
    and ask now and then for results; here there is nothing else to do, so we wait. With its first
    ticket from an engine, the decode engine does a handshake with that engine and makes a plan:
    which bytes to read from where. The prefill engine does nothing for the read itself.
    """
    decode.load("decode-1", ticket, PROMPT, DECODE_PAGES)
    results = wait_for_load(decode)
    for error in results.failed.values():
        raise error
    [figures] = results.loads
    print(f"{figures.nbytes} bytes in {figures.copies} copies, {figures.seconds * 1e3:.1f} ms")


def compare(prefill_cache: np.ndarray, decode_cache: np.ndarray) -> None:
    """Step 5: compare the pages on decode with those on prefill, token by token.

    For that, the pages of both are brought into the form (token, head, element).
    """
    computed = prefill_cache[PREFILL_PAGES].swapaxes(1, 2).reshape(-1, HEADS, ELEMENTS)
    loaded = decode_cache[DECODE_PAGES].reshape(-1, HEADS, ELEMENTS)
    tokens = len(PROMPT)
    print("equal" if np.array_equal(computed[:tokens], loaded[:tokens]) else "NOT EQUAL")


def release(prefill: SingleRankEngine) -> None:
    """Step 6: wait until prefill knows that its pages were read, and may use them for others."""
    while not (sent := prefill.results(timeout=1.0).sent):
        pass
    print(f"pages that may be given back now: those of {', '.join(sent)}")


def load_again(decode: SingleRankEngine, ticket: Ticket) -> None:
    """Step 7: use the ticket again, although its pages are no longer held.

    After every read, the decode engine checks that the pages were held until the read had ended.
    These were not, so the load fails, and the decode engine logs that as a warning, beside what is
    printed here. A real engine would then compute the prompt itself; it never decodes from pages
    that may have changed.
    """
    print("the same ticket once more, which has to fail, with a warning in the log:", flush=True)
    decode.load("decode-2", ticket, PROMPT, DECODE_PAGES)
    [error] = wait_for_load(decode).failed.values()
    print(f"not loaded: {error}")


def wait_for_load(decode: SingleRankEngine) -> Results:
    """Wait until a load has ended, with success or not, and return the results that report it."""
    while not (results := decode.results(timeout=1.0)).received:
        pass
    return results


if __name__ == "__main__":
    try:
        main()
    except KVFerryError as error:  # its text says what to change
        raise SystemExit(str(error)) from error
