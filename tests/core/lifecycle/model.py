"""Walks through the simulation: those that find the planted faults, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tests.core.lifecycle.fabric import Components, ProtocolViolation
from tests.core.lifecycle.faults import Walk
from tests.core.lifecycle.turns import LEASE, LOAD_TIMEOUT, PAGES, PATIENCE, TTL
from tests.core.lifecycle.world import PLANS, Options, World

KINDS = ("plain", "staged", "early", "pair")


def replay(
    components: Components, options: Options, actions: Sequence[str]
) -> ProtocolViolation | None:
    """Return the violation of these actions, after which all must come to an end."""
    world = World(options, components)
    try:
        for action in actions:
            world.act(action)
            world.check()
        world.finish()
    except ProtocolViolation as violation:
        return violation
    return None


def walk(
    components: Components, options: Options, seed: str, taken: Callable[[str], object] = str
) -> int:
    """Take a random walk to its end; ``taken`` is called with each action.

    Returns the number of its steps, each of which is one or more actions. Raises
    ``ProtocolViolation``.
    """
    rng = random.Random(seed)
    steps = rng.choice((4, 8, 16, 32))
    walker, world = _Walker(rng, options), World(options, components)
    try:
        for _ in range(steps):
            for action in walker.burst(world):
                taken(action)
                world.act(action)
                world.check()
        world.finish()
    except ProtocolViolation as violation:
        violation.add_note(f"in the walk {seed!r} with {options}")
        raise
    return steps


def draw_options(kind: str, seed: str) -> Options:
    """Return random options of a kind of simulation."""
    rng = random.Random(seed)
    ranks = rng.choice(sorted(PLANS)) if kind == "plain" else rng.choice((1, 2))
    chosen = Options(
        ranks=ranks, plans=f"{rng.randrange(5)}{rng.randrange(5)}", slots=rng.randint(1, PAGES)
    )
    if kind == "plain":
        return replace(chosen, max_held=rng.choice((None, None, 2, 3)))
    if kind == "staged":
        return replace(chosen, staged=rng.randint(1, 3))
    if kind == "early":
        return replace(chosen, early=True, slots=rng.randint(1, 2))
    return Options(pair=True, max_held=rng.choice((None, PAGES - 2)))


class _Walker:
    """Choose what comes next: a request, a failure, some time, or any possible steps."""

    def __init__(self, rng: random.Random, options: Options) -> None:
        self._rng = rng
        paces = [(0, 1, 2, 3, 8), (0, 0, 0, 8), (0, 1), (8,)]
        self._items = rng.choice(paces + [(0,)] * 3 if options.staged else paces)
        self._slow = rng.choice((("", " slow=1", " slow=2"), (" slow=1", " slow=2"), ("",)))
        # Where both of a pair hold prompts, each must keep some blocks for itself: a prompt's hold
        # is not ended while a consumer waits for it, so that they could wait for each other.
        both = ["nothing", "prompt", "answer"]
        self._leaves = dict.fromkeys("PAB", both)
        if options.pair and options.max_held is None:
            second = rng.choice(("answer", "prompt"))
            self._leaves = {"A": ["nothing", "answer"], "B": ["nothing", second]}

    def burst(self, world: World) -> Iterator[str]:
        rng = self._rng
        kinds = self._asks, self._runs, self._moves, self._stops, self._waits, self._fails
        yield from rng.choices((*kinds, self._revokes), (6, 3, 8, 2, 2, 2, 1))[0](world)

    def _revokes(self, world: World) -> Iterator[str]:
        """Yield a request to end what an engine holds, or updates of engines."""
        name, rng = self._rng.choice(list(world.engines)), self._rng
        if rng.random() < 0.5:
            yield rng.choice((f"revoke {name}", f"revoke {name} 1"))
            return
        for each in rng.choice((name, "PAB", "PA", "ABP")):
            if each in world.engines:
                yield f"update {each}"

    def _pick(self, *choices: str) -> str:
        return self._rng.choice(choices)

    def _sometimes(self, word: str) -> str:
        """Return a word in one of six cases."""
        return f" {word}" if self._rng.random() < 1 / 6 else ""

    def _asks(self, world: World) -> Iterator[str]:
        rng, options = self._rng, world.options
        names = list(world.engines)
        consumers = names[-2:]
        producers = names if options.pair else ["P"]
        if options.early:
            size = rng.randint(1, 3)
            how = self._pick("", "", "", " how=drafter", " how=unfit")
            follower = self._pick("", *(f" follower={name}" for name in "ABAB"))
            yield f"ask P {size}{follower}{how}"
            return
        if options.pair and rng.random() < 0.1:
            yield from self._fill(world)
            return
        if rng.random() < 0.6:
            name = rng.choice(producers)
            leaves = self._pick(*self._leaves[name], *self._leaves[name][1:] * 3)
            drafter = leaves == "prompt" and rng.random() < (0.7 if options.staged else 0.3)
            how = " how=drafter" if drafter else self._sometimes("how=errs")
            chunks = self._sometimes("chunks=2")
            yield f"ask {name} {rng.randint(1, 2)} leaves={leaves}{chunks}{how}"
            yield from self._runs(world, name)
        if rng.random() < 0.7:
            one, back = rng.choice(consumers), rng.choice((0, 0, 0, 1, 2))
            for name in rng.choice(([one], [one], consumers, [one, one], [one] * 3)):
                leaves = self._pick(*self._leaves[name]) if options.pair else "nothing"
                how = self._pick(*["unfit", "forged", "sample", "sample"], *[""] * 8)
                yield (
                    f"ask {name} {rng.randint(1, 2)} back={back} leaves={leaves}"
                    + (f" how={how}" if how else "")
                )
                yield from self._runs(world, name)

    def _fill(self, world: World) -> Iterator[str]:
        """Fill both engines with held blocks, and ask each to go on with those of the other."""
        names = self._rng.sample("AB", 2)
        for name in names:
            for _ in range(2):
                yield f"ask {name} 2 leaves={self._leaves[name][-1]}"
        for _ in range(self._rng.randint(2, 4)):
            for name in names:
                yield f"run {name}"
        for name in names:
            for back in range(2):
                yield f"ask {name} 2 back={back} leaves={self._pick(*self._leaves[name])}"

    def _runs(self, world: World, name: str = "") -> Iterator[str]:
        rng = self._rng
        name = name or rng.choice(list(world.engines))
        for _ in range(rng.randint(0, 3)):
            yield f"run {name} {rng.choice(self._items)}{rng.choice(self._slow)}"

    def _moves(self, world: World) -> Iterator[str]:
        """Yield possible steps, while some engines, ranks or kinds of steps stand still."""
        rng = self._rng
        names = [
            f"{name}{rank}"
            for name, each in world.engines.items()
            for rank in range(len(each.ranks))
        ]
        verbs = ["schedule", "process", "launch", "device", "poll", "tick", "answer", "copy"]
        verbs += ["land", "deliver", "follow"]
        still = {each for each in (*world.engines, *names, *verbs) if rng.random() < 0.12}
        if rng.random() < 0.3:
            still = set()
        for _ in range(rng.randint(1, 30)):
            found = [move.split() for move in world.moves()]
            moves = [move for move in found if still.isdisjoint((*move[:2], move[1][0]))]
            if not moves:
                return
            verb = rng.choice([move[0] for move in moves])
            some = moves if rng.random() < 0.5 else [move for move in moves if move[0] == verb]
            yield " ".join(rng.choice(some))

    def _stops(self, world: World) -> Iterator[str]:
        name, verb = self._rng.choice(list(world.engines)), self._pick("abort", "abort", "preempt")
        if self._rng.random() < (0.3 if world.options.staged else 0.1):
            yield f"reset {name}"
        else:
            yield f"{verb} {name} {self._rng.randint(0, 3)}"

    def _waits(self, world: World) -> Iterator[str]:
        rng, options = self._rng, world.options
        if options.early and rng.random() < 0.5:
            yield "wait 0 5"
        elif rng.random() < 0.3:
            yield "settle"
        elif options.kind == "plain" and rng.random() < 0.5:
            ranks = self._pick("", " 0 1", " 1 2", " 0 0")
            yield self._pick("patient", f"starve {rng.choice((3, 5, 7, 12))}{ranks}")
        else:
            seconds = (1, LEASE - 1, LEASE, TTL - 1, TTL, LOAD_TIMEOUT, PATIENCE)
            yield f"wait {int(rng.choice(seconds))}"

    def _fails(self, world: World) -> Iterator[str]:
        rng, options = self._rng, world.options
        rank = f"{self._pick('A', 'B')}{rng.randint(0, 1)}"
        flag, index = rng.randint(0, 1), rng.randint(0, 3)
        choices = [f"fail {index} {flag}", f"part {rank} {flag}"]
        if options.pair:
            choices.append(f"lose {index}")
        if copies := [move for move in world.moves() if move.startswith("copy")]:
            choices += [rng.choice(copies).rpartition(" ")[0] + " -1"] * 4
        if options.kind == "plain":
            links = self._pick("stay", "stay", "break", "failing", "closed")
            messages = self._pick("", " messages=gone")
            restart = f"restart {self._pick('P', 'P', 'A', 'B')} {links}{messages}"
            choices += [restart, restart, f"stray {index}"]
            choices.append(f"answer {rank} {index} refused=1")
        yield rng.choice(choices)


def search(
    kind: str, examples: int, components: Components | None = None, seed: str = ""
) -> Iterator[Walk]:
    """Yield the random walks that violate the protocol."""
    for example in range(examples):
        actions: list[str] = []
        options = draw_options(kind, name := f"{seed}{kind} {example}")
        try:
            walk(components or Components(), options, name, actions.append)
        except ProtocolViolation as violation:
            yield Walk(found=violation.what, options=options, actions=tuple(actions))
