"""Write ``sequences.json`` anew: ``python -m tests.core.lifecycle.record [--all] [FAULT...]``

Sequences that still find their fault are kept, unless ``--all``, or those of the named faults are
to be made anew. For the others, search for a violation, and make the sequence as short as it gets.
Run it when ``test_models.py`` fails after a change of the simulation or of a planted fault.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

from tests.core.lifecycle.components import Components
from tests.core.lifecycle.faults import PLANTED
from tests.core.lifecycle.model import Sequence, load, replay, save, search
from tests.core.lifecycle.turns import PAGES

EXAMPLES = 20_000
"""Most faults are caught in some hundred walks."""
TRIES = 3


def record(fault: str, examples: int = EXAMPLES) -> Sequence | None:
    """Return the shortest sequence that the first few violations lead to."""
    components, kind = PLANTED[fault].components(), PLANTED[fault].kind
    found = search(kind, examples, components, seed=fault)
    shortened = (shorten(fault, each) for each in found if finds(fault, each))
    return min(itertools.islice(shortened, TRIES), key=lambda each: len(each.actions), default=None)


def finds(fault: str, sequence: Sequence) -> bool:
    """Return whether a sequence breaks that invariant with the fault, and none without it."""
    _, options, actions = sequence
    violation = replay(PLANTED[fault].components(), options, actions)
    is_found = violation is not None and violation.what == sequence.found
    return is_found and replay(Components(), options, actions) is None


def shorten(fault: str, sequence: Sequence) -> Sequence:
    """Leave out actions, several at a time and then each, and what can be left out of them."""
    length = len(sequence.actions)
    while length:
        start = 0
        while start < len(sequence.actions):
            actions = sequence.actions[:start] + sequence.actions[start + length :]
            if finds(fault, less := sequence._replace(actions=actions)):
                sequence = less
            else:
                start += length
        length //= 2
    simpler: Sequence | None = sequence
    while simpler is not None:
        sequence = simpler
        simpler = next((each for each in _simpler(sequence) if finds(fault, each)), None)
    return sequence


def _simpler(sequence: Sequence) -> Iterator[Sequence]:
    options, actions = sequence.options, sequence.actions
    for plainer in (
        replace(options, ranks=1),
        replace(options, plans="00"),
        replace(options, slots=PAGES),
        replace(options, max_held=None),
        replace(options, staged=min(options.staged, 2)),
    ):
        if plainer != options:
            yield sequence._replace(options=plainer)
    for i, action in enumerate(actions):
        yield sequence._replace(actions=actions[:i] + actions[i + 1 :])
        words = action.split()
        for j in range(2, len(words)):
            less = " ".join(words[:j] + words[j + 1 :])
            yield sequence._replace(actions=[*actions[:i], less, *actions[i + 1 :]])


def main(arguments: list[str]) -> None:
    known = load()
    made: dict[str, Sequence] = {}
    for fault in PLANTED:
        is_kept = fault in known and not {"--all", fault} & set(arguments)
        if is_kept and finds(fault, known[fault]):
            made[fault] = known[fault]
        elif (new := record(fault)) is not None:
            made[fault] = new
            print(f"{fault}: {new.found} {'; '.join(new.actions)}", flush=True)  # noqa: T201
            save({name: it for name, it in (known | made).items() if name in PLANTED})
    save(made)
    if missing := PLANTED.keys() - made.keys():
        raise SystemExit(f"not found: {sorted(missing)}")


if __name__ == "__main__":
    main(sys.argv[1:])
