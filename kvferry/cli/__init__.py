"""The ``kvferry`` command.

This module knows the commands' names, options and help, and imports what they do when they run,
so that ``kvferry --help`` costs no more than typer.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvferry
from kvferry.core.errors import KVFerryError

app = typer.Typer(
    name="kvferry",
    help="Moves the KV cache between LLM serving engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Help in rich's boxes would import rich's Markdown parser: 0.15 s.
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; what kvferry refuses becomes one line and exit status 1."""
    try:
        app()
    except KVFerryError as exc:
        typer.echo(f"kvferry: {exc}", err=True)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvferry.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version


@app.command()
def drivers(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the installed drivers, and what each can do here."""
    from kvferry.cli.drivers import run

    run(as_json=as_json)


@app.command()
def demo() -> None:
    """Move a KV cache into another shape; check every byte."""
    from kvferry.cli.demo import run

    raise typer.Exit(run())
