"""The ``kvferry`` command.

``kvferry.cli.commands`` has the subcommands. ``kvferry health``, which probes call every few
seconds, starts without them, since typer takes longer to import than the probe takes.
"""

from __future__ import annotations

import sys

from kvferry.core.errors import KVFerryError

PROBE = "health"
INTERRUPTED = 130
"""The exit status after Ctrl-C, as of a shell."""


def main() -> None:
    """Run the command line.

    A ``KVFerryError`` ends it with a line on stderr and exit status 1, Ctrl-C with 130.
    """
    try:
        if sys.argv[1:2] == [PROBE]:
            _probe(sys.argv[2:])
        from kvferry.cli.commands import app

        app()
    except KVFerryError as exc:
        sys.exit(refused(exc))
    except KeyboardInterrupt:
        sys.exit(interrupted())
    except SystemExit as exc:
        # typer ends a command that is interrupted with this status, without a word.
        sys.exit(interrupted() if exc.code == INTERRUPTED else exc.code)


def refused(error: KVFerryError) -> int:
    """Print an error on stderr, and return 1, the exit status of a failed command."""
    sys.stderr.write(f"kvferry: {error}\n")
    return 1


def interrupted() -> int:
    """Print on stderr that Ctrl-C ended the command, and return its exit status."""
    sys.stderr.write("kvferry: interrupted\n")
    return INTERRUPTED


def _probe(arguments: list[str]) -> None:
    """Run ``kvferry health`` and exit, unless the arguments need the help or errors of typer."""
    from kvferry.cli import health

    options = health.parse(arguments)
    if options is not None:
        sys.exit(health.run(**options))
