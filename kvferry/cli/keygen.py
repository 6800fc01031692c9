"""``kvferry keygen``: make engines' keys and their ticket secret, and print the settings."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.cli.output import output
from kvferry.core.errors import SecretError
from kvferry.core.security import generate

TICKETS = "ticket"
PROBE = "probe"  # the name of a pair of keys that is for ``kvferry health`` and ``kvferry doctor``
SECRET, PUBLIC = ".secret", ".public"
ONLY_OWNER = 0o600
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def run(folder: Path, engine: Sequence[str] | None = None) -> None:
    """Write the keys of engines, and print the settings of each."""
    engines = engine or ["prefill", "decode"]
    _check_names(engines)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        contents = _contents(folder, engines)
        _write_all(contents)
    except OSError as exc:
        raise SecretError(
            f"{exc.filename or folder} cannot be written ({exc.strerror}): name another folder"
        ) from exc
    console = output()
    console.print(f"Wrote, for their owner only: {', '.join(path.name for path in contents)}.")
    if folder / f"{TICKETS}{SECRET}" not in contents:
        console.print(f"Kept {TICKETS}{SECRET}, which was there.")
    for name in engines:
        console.print(_instructions(folder.absolute(), name), markup=False, soft_wrap=True)
    console.print(
        "\nCopy to the host of each engine only the files that it names, by a way that you trust, "
        "and correct the paths there. Engines that were set up before need the new .public files "
        "in their curve_peers, too. All engines must have the same ticket secret."
    )


def _check_names(engines: Sequence[str]) -> None:
    for engine in engines:
        if not NAME.fullmatch(engine) or engine == TICKETS:
            raise SecretError(
                f"{engine!r} cannot be the name of an engine's files: use up to 64 letters, "
                f"digits, dots, dashes and underscores, and not {TICKETS!r}"
            )
    if len(set(engines)) != len(engines):
        raise SecretError("an engine is named twice: give each of them one --engine")


def _contents(folder: Path, engines: Sequence[str]) -> dict[Path, str]:
    """Make the keys, and a ticket secret if there is none; return each file's content by path."""
    contents: dict[Path, str] = {}
    for engine in engines:
        pair = generate()
        contents[folder / f"{engine}{SECRET}"] = f"{pair.secret.hex()}\n"
        contents[folder / f"{engine}{PUBLIC}"] = f"# {engine}\n{pair.public.hex()}\n"
    existing = [path.name for path in contents if os.path.lexists(path)]
    if existing:
        raise SecretError(
            f"{folder} has {', '.join(existing)} already, and nothing is overwritten: name another "
            "folder, or other engines with --engine"
        )
    tickets = folder / f"{TICKETS}{SECRET}"
    if not os.path.lexists(tickets):
        contents[tickets] = f"{secrets.token_hex(32)}\n"
    return contents


def _write_all(contents: Mapping[Path, str]) -> None:
    """Write all files; if one cannot be written, remove those that were written before."""
    written: list[Path] = []
    try:
        for path, text in contents.items():
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, ONLY_OWNER)
            written.append(path)
            with os.fdopen(opened, "w") as file:
                os.fchmod(opened, ONLY_OWNER)
                file.write(text)
    except OSError:
        for path in written:
            path.unlink()
        raise


def _instructions(folder: Path, engine: str) -> str:
    if engine == PROBE:
        return (
            f"\nTo ask an engine, give kvferry health and kvferry doctor these options:\n"
            f"--curve-secret-key=file:{folder / PROBE}{SECRET} "
            f"--curve-peer=file:{folder}/ENGINE{PUBLIC}"
        )
    peers = sorted(path for path in folder.glob(f"*{PUBLIC}") if path.stem != engine)
    settings = {
        "curve_secret_key": f"file:{folder / engine}{SECRET}",
        "curve_peers": [f"file:{path}" for path in peers] or ["file:PUBLIC KEY OF ANOTHER ENGINE"],
        "ticket_secrets": [f"file:{folder / TICKETS}{SECRET}"],
    }
    return f"\nInto kv_connector_extra_config of {engine}:\n{json.dumps(settings, indent=2)}"
