"""The ``kvferry`` command; ``commands`` has its subcommands.

``kvferry health``, which probes call every few seconds, starts without typer.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from kvferry.core.errors import KVFerryError

PROBE = "health"
INTERRUPTED = 130  # the exit status after Ctrl-C, as of a shell


def main() -> NoReturn:
    """Run the command line, and end the process: 1 after a ``KVFerryError``, 130 after Ctrl-C."""
    status = run()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads the output any more
        status = status or 1
    # Exit handlers are not run: some transport libraries crash in theirs, after the command has
    # done its work, and the process would then end with the status of the crash.
    os._exit(status)


def run() -> int:
    """Run the command line, and return its exit status."""
    try:
        if sys.argv[1:2] == [PROBE]:
            from kvferry.cli import health

            # Help and errors are typer's.
            if (options := health.parse(sys.argv[2:])) is not None:
                return health.run(**options)
        from kvferry.cli.commands import app

        app()
    except KVFerryError as exc:
        sys.stderr.write(f"kvferry: {exc}\n")
        return 1
    except (KeyboardInterrupt, SystemExit) as exc:
        status = INTERRUPTED if isinstance(exc, KeyboardInterrupt) else exc.code
        if status == INTERRUPTED:  # with which typer ends an interrupted command, without a word
            sys.stderr.write("kvferry: interrupted\n")
        return status if isinstance(status, int) else int(bool(status))
    return 0
