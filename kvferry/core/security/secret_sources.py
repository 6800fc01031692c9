"""Read secrets from files and the environment, never from the configuration itself.

A configuration is logged, shown by ``ps`` and passed between processes. So it only states where a
secret is, and no message of this module contains a secret.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.core.errors import SecretError
from kvferry.core.security.keys import public_keys

FILE = "file:"
"""How the source of a secret begins if it is a file."""
ENVIRONMENT = "env:"
"""How the source of a secret begins if it is an environment variable."""
CREDENTIALS = "CREDENTIALS_DIRECTORY"
"""The variable with which systemd names the folder of a service's credentials."""
HOW = f"write {FILE}PATH or {ENVIRONMENT}NAME; 'kvferry keygen' makes files"
MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A secret, and where it came from."""

    text: str = field(repr=False)  # without the white space around it
    source: str  # may be shown
    exposed: str = ""  # why others may know the secret, such as its file's mode


def is_source(text: str) -> bool:
    """Return whether a text says where a secret is, rather than being a secret."""
    return text.startswith((FILE, ENVIRONMENT))


def read_secret(source: str, environment: Mapping[str, str] = os.environ) -> Secret:
    """Read the secret at ``file:PATH`` or ``env:NAME``, or raise ``SecretError``."""
    if source.startswith(FILE):
        return _from_file(source, Path(source.removeprefix(FILE)).expanduser(), environment)
    if source.startswith(ENVIRONMENT):
        name = source.removeprefix(ENVIRONMENT)
        return _filled(source, environment.get(name, ""), "set the variable for this process")
    raise SecretError(
        # ``source`` is not shown: it may be the secret itself.
        f"a text of {len(source)} characters says what a secret is, or nothing at all, and not "
        f"where it is: {HOW}"
    )


def listed_keys(
    listed: Sequence[str], name: str, environment: Mapping[str, str] = os.environ
) -> frozenset[bytes]:
    """Return the keys of setting ``name``: hexadecimal, or sources with a key per line."""
    keys = public_keys((text for text in listed if not is_source(text)), name)
    for source in filter(is_source, listed):
        keys |= public_keys(read_secret(source, environment).text.splitlines(), source)
    return keys


def _from_file(source: str, path: Path, environment: Mapping[str, str]) -> Secret:
    try:
        with path.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            data = opened.read(MAX_FILE_BYTES + 1)
        text = data.decode("ascii")
    except (OSError, ValueError) as exc:  # ValueError: a path or a content that is no text
        why = exc.strerror if isinstance(exc, OSError) else "it is no ASCII text"
        raise SecretError(f"{source} cannot be read ({why}): {HOW}") from exc
    if len(data) > MAX_FILE_BYTES:
        raise SecretError(f"{source} has more than {MAX_FILE_BYTES} bytes: {HOW}")
    exposed = ""
    if mode & _open_bits(path, environment):
        exposed = f"{source} is open to others than its owner: chmod 600 it"
    return _filled(source, text, "'kvferry keygen' makes such files", exposed)


def _open_bits(path: Path, environment: Mapping[str, str]) -> int:
    """Return the bits of a file's mode that let others than its owner use it."""
    bits = stat.S_IRWXG | stat.S_IRWXO
    folder = environment.get(CREDENTIALS)
    if folder and path.resolve().is_relative_to(Path(folder).resolve()):
        # A systemd credential belongs to root, and an access control list lets the service read it:
        # the mode shows the list's mask as permissions of the group, which has none.
        bits &= ~stat.S_IRGRP
    return bits


def _filled(source: str, text: str, remedy: str, exposed: str = "") -> Secret:
    """Return the secret in a text, or refuse a text that is empty."""
    if not text.strip():
        raise SecretError(f"{source} is empty or not set: {remedy}")
    return Secret(text=text.strip(), source=source, exposed=exposed)
