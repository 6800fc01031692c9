"""Find walks for planted faults: ``python -m tests.core.lifecycle.record [--all] [FAULT...]``

Walks that still find their fault are kept, unless ``--all``, or those of the named faults are to be
made anew. For the others, search for a violation, and make the walk as short as it gets. Run it
when ``test_models.py`` fails after a change of the simulation or of a planted fault. A new fault
begins with a walk of the options that its simulation needs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

from tests.core.lifecycle.fabric import Components
from tests.core.lifecycle.faults import PLANTED, Walk, write_walk
from tests.core.lifecycle.model import replay, search
from tests.core.lifecycle.turns import PAGES

EXAMPLES = 20_000
"""Most faults are caught in some hundred walks."""
TRIES = 3


def record(fault: str, examples: int = EXAMPLES) -> Walk | None:
    """Return the shortest walk that the first few violations lead to."""
    planted = PLANTED[fault]
    found = search(planted.walk.options.kind, examples, planted.components(), seed=fault)
    shortened = (shorten(fault, each) for each in found if finds(fault, each))
    return min(itertools.islice(shortened, TRIES), key=lambda each: len(each.actions), default=None)


def finds(fault: str, walk: Walk) -> bool:
    """Return whether a walk breaks that invariant with the fault, and none without it."""
    violation = replay(PLANTED[fault].components(), walk.options, walk.actions)
    is_found = violation is not None and violation.what == walk.found
    return is_found and replay(Components(), walk.options, walk.actions) is None


def shorten(fault: str, walk: Walk) -> Walk:
    """Leave out actions, several at a time and then each, and what can be left out of them."""
    length = len(walk.actions)
    while length:
        start = 0
        while start < len(walk.actions):
            actions = walk.actions[:start] + walk.actions[start + length :]
            if finds(fault, less := replace(walk, actions=actions)):
                walk = less
            else:
                start += length
        length //= 2
    simpler: Walk | None = walk
    while simpler is not None:
        walk = simpler
        simpler = next((each for each in _simpler(walk) if finds(fault, each)), None)
    return walk


def _simpler(walk: Walk) -> Iterator[Walk]:
    options, actions = walk.options, walk.actions
    for plainer in (
        replace(options, ranks=1),
        replace(options, plans="00"),
        replace(options, slots=PAGES),
        replace(options, max_held=None),
        replace(options, staged=min(options.staged, 2)),
    ):
        if plainer != options:
            yield replace(walk, options=plainer)
    for i, action in enumerate(actions):
        yield replace(walk, actions=actions[:i] + actions[i + 1 :])
        words = action.split()
        for j in range(2, len(words)):
            less = " ".join(words[:j] + words[j + 1 :])
            yield replace(walk, actions=(*actions[:i], less, *actions[i + 1 :]))


def main(arguments: list[str]) -> None:
    missing = []
    for fault, planted in PLANTED.items():
        if not {"--all", fault} & set(arguments) and finds(fault, planted.walk):
            continue
        if (walk := record(fault)) is None:
            missing.append(fault)
        else:
            write_walk(fault, walk)
            print(f"{fault}: {walk.found} {'; '.join(walk.actions)}", flush=True)  # noqa: T201
    if missing:
        raise SystemExit(f"not found: {sorted(missing)}")


if __name__ == "__main__":
    main(sys.argv[1:])
