"""The ``kvferry`` command.

This module knows the commands' names, options and help, and imports what they do when they run,
so that ``kvferry --help`` costs no more than typer.
"""

from __future__ import annotations

import sys
from pathlib import Path
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


@app.command()
def plan(
    prefill: Annotated[
        str,
        typer.Option(
            metavar="SETTINGS|FILE",
            help="The prefill engine: settings as below, or a JSON file with its layouts.",
            show_default=False,
        ),
    ],
    decode: Annotated[
        str,
        typer.Option(
            metavar="SETTINGS|FILE", help="The decode engine, likewise.", show_default=False
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="A model's config.json, or its folder. Leave it out if both engines are JSON "
            "files.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=1 << 24, help="How long the request is.")
    ] = 4096,
    dtype: Annotated[
        str | None,
        typer.Option(help="Element type of the cache, if not the config's.", show_default=False),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a picture (needs kvferry[plot])."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    write_layouts: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write prefill.json and decode.json there."),
    ] = None,
) -> None:
    """Say who reads what from whom, in how many copies of which size.

    \b
    SETTINGS are key=value pairs with commas between:
      tp, pp         ranks that share the heads, ranks that share the layers (1)
      dcp            ranks of the former that share a request's tokens (1),
      interleave     so many tokens in a row on each (1)
      block_size     tokens of a page (16)
      layout         how memory is nested: LBHNC (or HND), LBNHC (or NHD), LHBNC, BLHNC, BLNHC,
                     BHLNC; Layers, Blocks, Heads, tokeNs, Content, outermost first (LBNHC)
      kernel_block   tokens of the blocks that kernels cut a page into (they do not)

    \b
    FILE holds {"ranks": [LAYOUT, ...]}, a kvferry.core.layout.Layout as JSON for each rank, and
    may hold "windows": [TOKENS, ...], how far each group looks back (0: all the way);
    --write-layouts writes such files.

    \b
    Examples:
      kvferry plan path/to/model --prefill tp=2,layout=HND --decode tp=1,block_size=32
      kvferry plan --prefill prefill.json --decode decode.json --svg plan.svg

    No engine has to run. A request's pages are taken to lie apart, as in an engine that has run
    for a while, so that no two make one copy. Where copies are small, other layouts and block
    sizes are tried, and what would help is named. Exit status 1 if the two cannot exchange pages.
    """
    from kvferry.cli.plan import run

    run(
        model=model,
        prefill=prefill,
        decode=decode,
        tokens=tokens,
        dtype=dtype,
        svg=svg,
        as_json=as_json,
        write_layouts=write_layouts,
    )
