"""The two engines of ``kvferry plan``: from settings, from a file, or from a side channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from kvferry.cli.formatting import numbers
from kvferry.cli.plan.engines import (
    Engine,
    EngineError,
    PlanSettings,
    SettingsError,
    fit_states,
    make_engine,
    parse,
    read_engine,
)
from kvferry.cli.plan.fields import field_name
from kvferry.cli.plan.model import Model
from kvferry.cli.side_channel import Keys, host_and_port, keys_of
from kvferry.core.errors import AdmissionError, HandshakeError, IncompatibleError
from kvferry.core.layout import Field
from kvferry.core.side_channel.client import fetch
from kvferry.core.side_channel.compatibility import EngineInfo, agree
from kvferry.core.side_channel.connection import health

SECONDS = 10.0  # how long an engine may take for each of its two answers

UNKNOWN_WINDOWS = (
    "The side channel does not say which layers of decode have a sliding window: all tokens are "
    "counted. Name the model's config.json, too, if it has windows."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """A running engine: ``HOST:PORT`` of its side channel, and what its ranks publish there."""

    address: str
    info: EngineInfo

    def __str__(self) -> str:
        return f"engine {self.info.engine!r} at {self.address}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two engines, ``prefill`` or ``decode``.

    Attributes:
        source: The settings, the JSON file or the running engine that the layouts are from.
        notes: What else there is to know about the engine, a sentence each.
    """

    name: str
    engine: Engine
    source: PlanSettings | Path | RunningEngine
    notes: tuple[str, ...] = ()

    def rank_name(self, *ranks: int) -> str:
        """Return a name such as ``0-3 (pp 0)``, with the coordinates that these ranks share."""
        where = []
        for name in ("pp", "tp", "pcp", "dcp"):
            every = [getattr(one, name) for one in self.engine.coordinates]
            shared = {every[rank] for rank in ranks if every}
            if len(shared) == 1 < len(set(every)):
                where.append(f"{name} {shared.pop()}")
        return f"{numbers(ranks)} ({', '.join(where)})" if where else numbers(ranks)


def read_sides(
    texts: Mapping[str, str | None],
    addresses: Sequence[str],
    keys: tuple[str, Sequence[str]],
    model: Model | None,
    tokens: int,
) -> tuple[Side, Side]:
    """Return the engines that options describe, with room for a request of so many tokens.

    ``texts`` has settings or a file by the engine's name; one without runs at the next address.
    """
    running = [name for name, text in texts.items() if text is None]
    (secret, peers), count = keys, len(addresses)
    if len(running) != count:
        raise SettingsError(
            f"{len(texts) - len(running)} of --prefill and --decode and {count} times --from are "
            "given, and a plan is between two engines: name each with --prefill or --decode "
            "(settings, or a JSON file), or with --from HOST:PORT if it runs"
        )
    if len(peers) not in (0, count) or (secret and not count):
        raise SettingsError(
            f"--curve-peer is given {len(peers)} times and --from {count} times: give the public "
            "key of each engine, in the order of --from"
        )
    each = zip(addresses, peers or [""] * count, strict=True)
    asked = iter([_ask(address, keys_of(secret, peer)) for address, peer in each])
    sides = [
        _running_side(name, next(asked), model)
        if text is None
        else _given_side(name, text, model, tokens)
        for name, text in texts.items()
    ]
    for one, other in ((0, 1), (1, 0)):
        computed, engine = sides[one], sides[other].engine
        if isinstance(computed.source, PlanSettings) and running:
            sides[one] = replace(computed, engine=with_keys_of(computed.engine, engine))
    return sides[0], sides[1]


def _ask(address: str, keys: Keys) -> RunningEngine:
    host, port = host_and_port("--from", address)
    try:
        found = health(host, port, timeout=SECONDS, access=keys.access, key=keys.server)
        info = fetch(host, port, found.engine, timeout=SECONDS, access=keys.access, key=keys.server)
    except AdmissionError:
        raise
    except HandshakeError as exc:
        raise EngineError(
            f"--from {address}: {exc}. Start the engine, or correct the address: it is the "
            "engine's side_channel_host and side_channel_port"
        ) from exc
    return RunningEngine(address=address, info=info)


def _running_side(name: str, running: RunningEngine, model: Model | None) -> Side:
    ranks = running.info.ranks
    engine = Engine(
        ranks=tuple(payload.layout for payload in ranks),
        coordinates=tuple(payload.coordinates for payload in ranks),
    )
    if model is not None:
        engine = replace(
            engine,
            windows=_by_group(model.windows, engine),
            chunks=_by_group(model.chunks, engine) if model.chunks else (),
        )
    notes = (UNKNOWN_WINDOWS,) if model is None and name == "decode" else ()
    return Side(name=name, engine=engine, source=running, notes=notes)


def _by_group(lengths: Mapping[int, int], engine: Engine) -> tuple[int, ...]:
    """Return the sliding window, or the size of the chunks, of each cache group; 0 for none."""
    found = [0] * len(engine.ranks[0].groups)
    for f in (f for layout in engine.ranks for f in layout.fields):
        layer = field_name(f.key).layer
        if layer is not None and not f.draft and f.tokens:
            found[f.group] = lengths.get(layer, 0)
    return tuple(found)


def _given_side(name: str, text: str, model: Model | None, tokens: int) -> Side:
    if text.endswith(".json") or "=" not in text:
        return Side(name=name, engine=read_engine(Path(text)), source=Path(text))
    if model is None:
        raise SettingsError(
            f"--{name} {text!r} is how a model is set up: name the model's config.json first, or "
            "give a JSON file with the engine's layouts"
        )
    try:
        asked = parse(text)
        settings = fit_states(model, asked)
    except SettingsError as exc:
        raise SettingsError(f"--{name}: {exc}") from None
    enlarged = (
        f"Pages of {name} have {settings.block_size:,} tokens instead of {asked.block_size}: vLLM "
        "enlarges them until a page of attention has room for a state."
    )
    notes = (enlarged,) if settings != asked else ()
    engine = make_engine(model, settings, tokens)
    return Side(name=name, engine=engine, source=settings, notes=notes)


def with_keys_of(computed: Engine, running: Engine) -> Engine:
    """Return a computed engine whose fields have the keys, vLLM's names, of a running engine's."""
    keys = {
        _place(f): f.key
        for layout in running.ranks
        for f in layout.fields
        if not f.draft and field_name(f.key).layer is not None
    }
    layouts = [
        replace(
            layout,
            fields=tuple(structs.replace(f, key=keys.get(_place(f), f.key)) for f in layout.fields),
        )
        for layout in computed.ranks
    ]
    return replace(computed, ranks=tuple(layouts))


def _place(f: Field) -> tuple[int | None, str]:
    name = field_name(f.key)
    return name.layer, name.part


def refusal(prefill: Side, decode: Side) -> str:
    """Return why two running engines refuse each other at the handshake; empty if they do not."""
    one, other = prefill.source, decode.source
    if isinstance(one, RunningEngine) and isinstance(other, RunningEngine):
        try:
            agree(other.info.ranks[0], one.info.ranks[0])
        except IncompatibleError as exc:
            return f"The handshake refuses this pair: {exc}"
    return ""
