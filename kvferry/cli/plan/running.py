"""Engines for ``kvferry plan`` that run: their layouts, from their side channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from kvferry.cli.plan.engines import Engine, EngineError, SettingsError
from kvferry.cli.plan.fields import field_name
from kvferry.cli.plan.model import Model
from kvferry.cli.side_channel import NONE, Keys, host_and_port, keys_of
from kvferry.core.errors import AdmissionError, HandshakeError, IncompatibleError
from kvferry.core.layout import Field, Layout
from kvferry.core.side_channel import fetch, health
from kvferry.core.side_channel.compatibility import EngineInfo, agree

SECONDS = 10.0
"""How long an engine may take for each of its two answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """A running engine.

    Attributes:
        address: ``HOST:PORT`` of its side channel.
        info: What its ranks publish in the handshake.
    """

    address: str
    info: EngineInfo

    def __str__(self) -> str:
        return f"engine {self.info.engine!r} at {self.address}"

    def engine(self, model: Model | None) -> Engine:
        """Return the engine's layouts."""
        layouts = tuple(payload.layout for payload in self.info.ranks)
        return Engine(
            ranks=layouts,
            coordinates=tuple(payload.coordinates for payload in self.info.ranks),
            windows=() if model is None else _by_group(model.windows, layouts),
            chunks=_by_group(model.chunks, layouts) if model and model.chunks else (),
        )


def keys_of_engines(secret_key: str, peers: Sequence[str], engines: int) -> list[Keys]:
    """Return the keys for the side channel of each engine."""
    if not engines:
        raise SettingsError("--curve-secret-key and --curve-peer are keys for --from: add --from")
    if peers and len(peers) != engines:
        raise SettingsError(
            f"--curve-peer is given {len(peers)} times and --from {engines} times: give the public "
            "key of each engine, in the order of --from"
        )
    return [keys_of(secret_key, peer) for peer in peers or [""] * engines]


def read_running(address: str, keys: Keys = NONE) -> RunningEngine:
    """Ask a running engine for the layouts of its ranks."""
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


def refusals(prefill: RunningEngine, decode: RunningEngine) -> tuple[str, ...]:
    """Return why two engines refuse each other at the handshake; nothing if they do not."""
    try:
        agree(decode.info.ranks[0], prefill.info.ranks[0])
    except IncompatibleError as exc:
        return (f"The handshake refuses this pair: {exc}",)
    return ()


def with_keys_of(computed: Engine, running: Engine) -> Engine:
    """Return a computed engine whose fields have the keys that a running engine's fields have.

    These have vLLM's names of the layers. Fields that the running engine lacks keep their keys.
    """
    keys = {
        _place(f): f.key
        for layout in running.ranks
        for f in layout.fields
        if not f.draft and field_name(f.key).layer is not None
    }
    return replace(
        computed,
        ranks=tuple(
            replace(
                layout,
                fields=tuple(
                    structs.replace(f, key=keys.get(_place(f), f.key)) for f in layout.fields
                ),
            )
            for layout in computed.ranks
        ),
    )


def _place(f: Field) -> tuple[int | None, str]:
    """Return the layer of a field, and its name within the layer."""
    name = field_name(f.key)
    return name.layer, name.part


def _by_group(lengths: Mapping[int, int], layouts: tuple[Layout, ...]) -> tuple[int, ...]:
    """Return the sliding window, or the size of the chunks, of each cache group; 0 for none."""
    found = [0] * len(layouts[0].groups)
    for f in (f for layout in layouts for f in layout.fields):
        layer = field_name(f.key).layer
        if layer is not None and not f.draft and f.tokens:
            found[f.group] = lengths.get(layer, 0)
    return tuple(found)
