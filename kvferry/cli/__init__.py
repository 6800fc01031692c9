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
def demo(
    megabytes: Annotated[
        int,
        typer.Option(min=1, help="How much KV cache to move; needs three times as much memory."),
    ] = 256,
    driver: Annotated[
        str, typer.Option(help="The driver that moves it; 'kvferry drivers' lists them.")
    ] = "loopback",
    prefill: Annotated[
        str,
        typer.Option(
            metavar="RANKS/ORDER/TOKENS",
            help="The prefill engine: how many ranks (processes) share the heads; whether a page "
            "has its tokens inside its heads (HND) or its heads inside its tokens (NHD); tokens "
            "a page.",
        ),
    ] = "2/HND/16",
    decode: Annotated[
        str,
        typer.Option(metavar="ORDER/TOKENS", help="The decode engine, which is one process."),
    ] = "NHD/32",
) -> None:
    """Move a KV cache into another shape; check every byte.

    A prefill engine of two processes computes requests, and a decode engine (this process) pulls
    them: with real side channel, tickets, holds and fences, but without a model. Prints what went
    where, and how fast beside a plain memcpy. Exit status 0 only if every byte is right.

    Any shape goes to any shape: try --prefill 3/HND/16 --decode NHD/48. Between equal shapes
    (--prefill 1/NHD/32) whole pages cross, in far fewer and larger copies.
    """
    from kvferry.cli.demo import run

    raise typer.Exit(run(megabytes=megabytes, driver=driver, prefill=prefill, decode=decode))
