"""``kvferry check-config``: check a configuration on this host, before an engine starts."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer

from kvferry.cli.formatting import counted
from kvferry.cli.output import output
from kvferry.cli.side_channel import host_and_port
from kvferry.core.errors import AdmissionError, DriverError, HandshakeError, KVFerryError
from kvferry.core.security import Access
from kvferry.core.side_channel.connection import health
from kvferry.core.transport import registry
from kvferry.integrations.vllm.checks import (
    CANNOT,
    address_problems,
    late_turn_risk,
    setting_problems,
    sibling_problems,
)
from kvferry.integrations.vllm.config import KEYS as SETTINGS
from kvferry.integrations.vllm.config import Config, acceptable, risks
from kvferry.integrations.vllm.config import schema as settings_schema
from kvferry.integrations.vllm.security import examine_security_settings, open_access_risks
from kvferry.integrations.vllm.side_channel import loopback_risk
from kvferry.integrations.vllm.transfer_config import (
    EXTRA,
    KEYS,
    MODULE,
    MULTI,
    NAME,
    OLD_KEYS,
    extra_of,
    own_transfers,
)

SECONDS = 5.0  # how long a peer may take to answer

VALUES = {
    "kv_role": ("kv_producer", "kv_consumer", "kv_both"),
    "kv_load_failure_policy": ("recompute", "fail"),
}
"""The keys of ``--kv-transfer-config`` that have a few values only."""


class InputError(KVFerryError):
    """There is nothing to check: the argument is neither a JSON object nor a file with one."""


def run(config: str, peer: Sequence[str] | None = None, schema: bool = False) -> int:
    """Check a configuration, and print what is wrong with it; or print the schema of settings."""
    if schema:
        typer.echo(json.dumps(settings_schema(), indent=2))
        return 0
    if not config:
        raise typer.BadParameter("name a file, or give JSON", param_hint="FILE|JSON")
    given, addresses = read(config), [(each, *host_and_port("--peer", each)) for each in peer or ()]
    found, notes = list(_problems(given)), list[str]()
    for own in own_transfers(given) if is_transfer(given) else [{EXTRA: given}]:
        extra = extra_of(own)
        found += _settings_problems(extra)
        found += _peer_problems(acceptable(extra), addresses)
        notes += _notes(given, own)
    what = "--kv-transfer-config" if is_transfer(given) else EXTRA
    noted = f" but for {counted(len(notes), 'note')} above" if notes else ""
    fine = (
        f"no problem on this host{noted}. What depends on the model and on vLLM's other settings "
        "is checked when the engine starts"
    )
    summary = counted(len(found), "problem") if found else fine
    if not found and not addresses:
        summary += "; whether a peer can be reached, --peer HOST:PORT tells"
    lines = [*(f"- {problem}" for problem in found), *(f"note: {note}" for note in notes)]
    for line in [*lines, f"{what}: {summary}"]:
        output().print(line, markup=False)
    return int(bool(found))


def read(text: str) -> dict[str, Any]:
    """Return the JSON object in a text, or in the file that the text names."""
    literal = text.lstrip().startswith(("{", "["))
    try:
        given = json.loads(text if literal else Path(text).read_text(encoding="utf-8"))
    except OSError as exc:
        raise InputError(f"{text}: {exc.strerror}; name a file with JSON, or JSON itself") from exc
    except ValueError as exc:
        raise InputError(f"{'the argument' if literal else text} is no JSON: {exc}") from exc
    if not isinstance(given, dict):
        raise InputError(f"{text}: a JSON object is expected, not {type(given).__name__}")
    return given


def is_transfer(given: Mapping[str, Any]) -> bool:
    """Return whether an object is a ``--kv-transfer-config``, not ``kv_connector_extra_config``."""
    selects = {"kv_connector", "kv_connector_module_path", "kv_role", EXTRA} & given.keys()
    return bool(selects or (given.keys() & set(KEYS) and not given.keys() & set(SETTINGS)))


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    if not is_transfer(given):
        return
    own, connector = own_transfers(given), given.get("kv_connector")
    if not own:
        unselected = f"{connector!r} does not select this connector" if connector else "is missing"
        yield (
            f"kv_connector {unselected}: set kv_connector to {NAME!r} (or list it "
            f'under "connectors" of {MULTI}), and remove kv_connector_module_path or set it to '
            f"{MODULE!r}"
        )
    for each in (given, *(one for one in own if one is not given)):
        yield from _key_problems(each)
    for one in own:
        for problem in sibling_problems(_transfer(one), _transfer(given)):
            yield f"{CANNOT}{problem}"


def _transfer(keys: Mapping[str, Any]) -> SimpleNamespace:
    """Return a connector's part as vLLM's ``KVTransferConfig``, as far as its siblings matter."""
    return SimpleNamespace(
        kv_role=str(keys.get("kv_role")),
        kv_connector_extra_config=extra_of(keys),
        kv_load_failure_policy=str(keys.get("kv_load_failure_policy") or "fail"),
        is_kv_consumer=keys.get("kv_role") != "kv_producer",
    )


def _key_problems(transfer: Mapping[str, Any]) -> Iterator[str]:
    for key in transfer:
        if key in SETTINGS:
            yield f"{key!r} is a setting of {NAME}, which belongs into {EXTRA}: move it there"
        elif key not in KEYS + OLD_KEYS:
            [nearest] = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.0)
            yield f"unknown key {key!r} in --kv-transfer-config: did you mean {nearest!r}?"
    for key, values in VALUES.items():
        if (value := transfer.get(key)) not in (*values, None):
            yield f"{key} is {value!r}: set one of {', '.join(values)}"
    if transfer.get("kv_role") is None:
        yield f"kv_role is missing: set one of {', '.join(VALUES['kv_role'])}"
    if not isinstance(transfer.get(EXTRA, {}), Mapping):
        yield f"{EXTRA} is no JSON object: make it one, such as {{}}"


def _notes(given: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an engine with this configuration would warn of at start, and a default driver."""
    extra = extra_of(own)
    config = acceptable(extra)
    if "driver" not in extra:
        yield (
            f"driver is not set: the default, {config.driver!r}, is for engines of one host with "
            "their caches in CPU memory"
        )
    yield from risks(config)
    security, refused = examine_security_settings(config)
    yield from (
        security.exposed if refused else open_access_risks(security, config.side_channel_host)
    )
    chosen = "side_channel_host" in extra
    if own.get("kv_role") != "kv_consumer" and (risk := loopback_risk(config, chosen=chosen)):
        yield risk
    if is_transfer(given) and (risk := late_turn_risk(config, _transfer(given))):
        yield risk


def _settings_problems(extra: Mapping[str, Any]) -> Iterator[str]:
    found, config = list(setting_problems(extra)), acceptable(extra)
    try:
        registry.create(config.driver, config.driver_options).close()
    except DriverError as exc:
        found.append(str(exc))
    yield from dict.fromkeys(found)  # a driver that is not installed is found by both
    yield from address_problems(config, [0])


def _peer_problems(config: Config, addresses: Iterable[tuple[str, str, int]]) -> Iterator[str]:
    """Yield why engines do not answer this host with these settings."""
    security, refused = examine_security_settings(config)
    for peer, host, port in () if refused else addresses:  # or named among the settings' problems
        try:
            engine = _engine_at(host, port, security.access)
        except HandshakeError as exc:
            yield f"--peer {peer}: {exc}"
        else:
            output().print(f"peer {peer}: engine {engine} answers", markup=False)


def _engine_at(host: str, port: int, access: Access) -> str:
    *others, last = sorted(access.peers) or [b""]
    for key in others:
        try:
            return health(host, port, timeout=SECONDS, access=access, key=key).engine
        except AdmissionError:
            continue
    return health(host, port, timeout=SECONDS, access=access, key=last).engine
