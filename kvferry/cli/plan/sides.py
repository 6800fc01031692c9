"""The two engines of ``kvferry plan``: from settings, from a file, or from a side channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

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
from kvferry.cli.plan.model import Model
from kvferry.cli.side_channel import Keys, host_and_port, keys_of
from kvferry.core.errors import AdmissionError, HandshakeError
from kvferry.core.side_channel.client import fetch
from kvferry.core.side_channel.compatibility import EngineInfo, agree
from kvferry.core.side_channel.connection import health

SECONDS = 10.0  # how long an engine may take for each of its two answers
CONVOLUTION = "/conv"
"""What follows a layer's name in the keys of its convolution's inputs, before the channels."""


class FieldName(NamedTuple):
    """The parts of a key, as ``("model.layers", 3, "k")``; without an index, the whole name."""

    owner: str
    layer: int | None
    part: str


def field_name(key: str) -> FieldName:
    """Return the parts of a field's key."""
    name, _, part = key.rpartition("/")
    if name.endswith(CONVOLUTION):
        name, part = name.removesuffix(CONVOLUTION), f"{CONVOLUTION[1:]}/{part}"
    words = name.split(".")
    if "indexer" in words:
        part = f"index {part}"  # a layer's latents have the same names
    for n, word in enumerate(words):
        if word.isascii() and word.isdecimal() and len(word) < 10:
            return FieldName(".".join(words[:n]), int(word), part)
    return FieldName(name, None, part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two engines, ``prefill`` or ``decode``.

    ``source`` says what its layouts are from: ``settings``, a file or a running engine.
    """

    name: str
    engine: Engine
    source: str
    settings: PlanSettings | None = None

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
    given = sum(text is not None for text in texts.values())
    (secret, peers), count = keys, len(addresses)
    if given + count != len(texts):
        raise SettingsError(
            f"{given} of --prefill and --decode and {count} times --from are "
            "given, and a plan is between two engines: name each with --prefill or --decode "
            "(settings, or a JSON file), or with --from HOST:PORT if it runs"
        )
    if len(peers) not in (0, count) or (secret and not count):
        raise SettingsError(
            f"--curve-peer is given {len(peers)} times and --from {count} times: give the public "
            "key of each engine, in the order of --from"
        )
    each = zip(addresses, peers or [""] * count, strict=True)
    running = [_ask(address, keys_of(secret, peer)) for address, peer in each]
    if len(running) == len(texts):
        agree(running[1].ranks[0], running[0].ranks[0])
    asked = iter(zip(addresses, running, strict=True))
    sides = [
        _running_side(name, *next(asked), model)
        if text is None
        else _given_side(name, text, model, tokens)
        for name, text in texts.items()
    ]
    for one, other in ((0, 1), (1, 0)):
        if running and sides[one].settings:
            named = with_keys_of(sides[one].engine, sides[other].engine)
            sides[one] = replace(sides[one], engine=named)
    return sides[0], sides[1]


def _ask(address: str, keys: Keys) -> EngineInfo:
    host, port = host_and_port("--from", address)
    try:
        found = health(host, port, timeout=SECONDS, **keys)
        return fetch(host, port, found.engine, timeout=SECONDS, **keys)
    except AdmissionError:
        raise
    except HandshakeError as exc:
        raise EngineError(
            f"--from {address}: {exc}. Start the engine, or correct the address: it is the "
            "engine's side_channel_host and side_channel_port"
        ) from exc


def _running_side(name: str, address: str, running: EngineInfo, model: Model | None) -> Side:
    engine = Engine(
        ranks=tuple(payload.layout for payload in running.ranks),
        coordinates=tuple(payload.coordinates for payload in running.ranks),
    )
    if model is not None:
        lengths = [0] * len(engine.ranks[0].groups)
        for f in (f for layout in engine.ranks for f in layout.fields):
            layer = field_name(f.key).layer
            if layer is not None and not f.draft and f.tokens:
                lengths[f.group] = model.windows.get(layer, 0)
        engine = engine.with_reach(model, lengths)
    return Side(name=name, engine=engine, source=f"engine {running.engine!r} at {address}")


def _given_side(name: str, text: str, model: Model | None, tokens: int) -> Side:
    if text.endswith(".json") or "=" not in text:
        return Side(name=name, engine=read_engine(Path(text)), source=text)
    if model is None:
        raise SettingsError(
            f"--{name} {text!r} is how a model is set up: name the model's config.json first, or "
            "give a JSON file with the engine's layouts"
        )
    try:
        settings = fit_states(model, parse(text))
    except SettingsError as exc:
        raise SettingsError(f"--{name}: {exc}") from None
    engine = make_engine(model, settings, tokens)
    return Side(name=name, engine=engine, source=str(settings), settings=settings)


def with_keys_of(computed: Engine, running: Engine) -> Engine:
    """Return a computed engine whose fields have the keys, vLLM's names, of a running engine's."""
    keys = {  # by layer and part
        field_name(f.key)[1:]: f.key
        for layout in running.ranks
        for f in layout.fields
        if not f.draft and field_name(f.key).layer is not None
    }
    layouts = []
    for layout in computed.ranks:
        fields = [
            structs.replace(f, key=keys.get(field_name(f.key)[1:], f.key)) for f in layout.fields
        ]
        layouts.append(replace(layout, fields=tuple(fields)))
    return replace(computed, ranks=tuple(layouts))
