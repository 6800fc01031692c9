"""Write ``sequences.json`` anew: ``python -m tests.core.lifecycle.record [--all]``

Sequences that still find their fault are kept, unless ``--all``; for the others, search for a
violation, and make the sequence as short as it gets. Run it when ``test_models.py`` fails after
a change of a simulation, a rule or a planted fault. A fault that is not found ends the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.core.lifecycle.model import Call, Sequence, call, replay
from tests.core.lifecycle.planted import MODELS, PLANTED, catch, load, plant, save
from tests.core.lifecycle.two_engines import Leaves


class Program:
    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getattr__(self, rule: str) -> Any:
        def write_down(**arguments: Any) -> None:
            if arguments:  # an invariant has none
                self.calls.append(call(rule, **arguments))

        return write_down


def record(model: str, fault: str) -> Sequence:
    machine = plant(model, fault)
    for steps in (3, 6, machine.steps):
        machine.steps = steps
        if (violation := catch(machine, shrinks=True)) is not None:
            break
    else:
        raise RuntimeError(f"no violation found of {model}: {fault}")
    program = Program()
    code = [line for line in violation.__notes__ if line.startswith("state")]
    exec("\n".join(code), {"Planted": lambda: program, "Leaves": Leaves})

    def works(calls: list[Call]) -> bool:
        return finds(model, fault, Sequence(violation.what, calls))

    calls = program.calls
    if not works(calls):
        raise RuntimeError(f"what Hypothesis prints of {model}: {fault} does not find it again")
    while (shorter := shorten(calls, works)) != calls:
        calls = shorter
    return Sequence(violation.what, calls)


def shorten(calls: list[Call], works: Callable[[list[Call]], bool]) -> list[Call]:
    """Leave out calls, arguments with a default, and elements of arguments."""
    for i in reversed(range(1, len(calls))):  # the first starts the simulation
        if works(less := calls[:i] + calls[i + 1 :]):
            calls = less
    for i, (rule, arguments) in enumerate(calls):
        for name in list(arguments):
            for fewer in _fewer(arguments, name):
                if works(less := [*calls[:i], (rule, fewer), *calls[i + 1 :]]):
                    calls, arguments = less, fewer
                    break
    return calls


def _fewer(arguments: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments without one, or with less of it, the simplest first."""
    value = arguments[name]
    yield {each: arguments[each] for each in arguments if each != name}
    if isinstance(value, bytes | list):
        yield from (arguments | {name: value[:n]} for n in range(1, len(value)))
        yield from (arguments | {name: less} for less in _without_one(value))
    if isinstance(value, bytes):
        zeroed = (value[:i] + b"\0" + value[i + 1 :] for i in range(len(value)) if value[i])
        yield from (arguments | {name: less} for less in zeroed)


def _without_one(elements: Any) -> Iterator[Any]:
    for i in range(len(elements)):
        yield elements[:i] + elements[i + 1 :]


def finds(model: str, fault: str, sequence: Sequence) -> bool:
    """Return whether a sequence breaks that invariant with the fault, and none without it."""
    try:
        violation = replay(plant(model, fault), sequence.calls)
    except TypeError:  # a rule, or an argument of one, is not there any more, or is needed
        return False
    is_found = violation is not None and violation.what == sequence.found
    return is_found and replay(MODELS[model], sequence.calls) is None


def main(options: Iterable[str]) -> None:
    known = {} if "--all" in options else load()
    made: dict[str, dict[str, Sequence]] = {}
    for model, faults in PLANTED.items():
        made[model] = {}
        for fault in faults:
            old = known.get(model, {}).get(fault)
            is_kept = old is not None and finds(model, fault, old)
            made[model][fault] = old if old is not None and is_kept else record(model, fault)
            print("kept" if is_kept else "made", f"{model}: {fault}", flush=True)  # noqa: T201
    save(made)


if __name__ == "__main__":
    main(sys.argv[1:])
