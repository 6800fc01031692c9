"""The subcommands of ``kvferry``: their names, options and help.

The code of a subcommand is imported only when that subcommand runs, so that ``kvferry --help``
costs no more than typer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import kvferry


def given(metavar: str, help: str, *names: str, **more: Any) -> Any:  # noqa: A002, ANN401
    """Declare an option whose default is not shown."""
    return typer.Option(*names, metavar=metavar or None, help=help, show_default=False, **more)


def named(metavar: str, help: str) -> Any:  # noqa: A002, ANN401
    """Declare an argument."""
    return typer.Argument(metavar=metavar or None, help=help, show_default=False)


shown = typer.Option
MOST_TOKENS = 1 << 24
tokens_option = partial(typer.Option, min=1, max=MOST_TOKENS)

Engine = named("HOST:PORT", "The engine's side_channel_host and side_channel_port.")
Json = Annotated[bool, shown("--json", help="Print JSON instead of text.")]
CurveSecretKey = Annotated[
    str,
    given(
        "PLACE",
        "Where this command's own secret key is, for a side channel with keys: file:PATH or "
        "env:NAME. The engine's curve_peers has to list the public one.",
    ),
]
CurvePeer = Annotated[str, given("KEY", "That engine's public key, or its place.")]
Timeout = Annotated[float, shown(min=0.001, max=86400, help="The most seconds to wait, in all.")]

app = typer.Typer(
    name="kvferry",
    help="Moves the KV cache between LLM serving engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Help in rich's boxes would import rich's Markdown parser: 0.15 s.
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvferry.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, shown("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


def _command(declared: Callable[..., None]) -> Callable[..., None]:
    """Add a command with these options and this help; ``run`` of its module does its work.

    The module ``kvferry.cli.NAME`` is imported only when the command runs. ``run`` takes the
    options by their names, and returns the exit status, or nothing for 0.
    """
    name = declared.__name__

    @wraps(declared)
    def run(**options: object) -> None:
        raise typer.Exit(import_module(f"kvferry.cli.{name}").run(**options) or 0)

    # typer cuts the summaries that it takes from docstrings to what fits into a line.
    summary = (declared.__doc__ or "").partition("\n")[0]
    app.command(name.replace("_", "-"), short_help=summary)(run)
    return run


@_command
def drivers(as_json: Json = False) -> None:
    """List the installed drivers, and what each can do here."""


@_command
def demo(
    megabytes: Annotated[
        int,
        shown(min=1, max=100_000, help="How much KV cache to move; needs three times the memory."),
    ] = 256,
    driver: Annotated[
        str, shown(help="The driver that moves it; 'kvferry drivers' lists them.")
    ] = "loopback",
    prefill: Annotated[
        str | None,
        given(
            "RANKS/ORDER/TOKENS",
            "The prefill engine: how many ranks share the heads; whether a page has tokens inside "
            "heads (HND) or heads inside tokens (NHD); tokens a page. 2/HND/16 if left out.",
        ),
    ] = None,
    decode: Annotated[
        str | None,
        given("ORDER/TOKENS", "The decode engine, of one rank. HND/16 if left out."),
    ] = None,
) -> None:
    """Move a KV cache between two engines, and check every byte.

    A prefill engine (a process, with two ranks) computes requests, and a decode engine (this
    process) pulls them: first between like pages (2/HND/16 and HND/16), so that large pieces are
    moved, then between unlike ones (2/HND/16 and NHD/32), whose pieces are a head of a token. Only
    the model is missing. Prints what was moved, and how fast compared with copies of pieces of the
    same size within one process, and with a memcpy. Exit status 0 only if every byte is right.

    With --prefill or --decode, only the given pair is moved. A cache of any shape can be moved into
    any other: try --prefill 3/HND/16 --decode NHD/48.
    """


@_command
def doctor(
    address: Annotated[
        str | None, named("HOST:PORT", "Also ask the side channel of a running engine.")
    ] = None,
    engine: Annotated[str | None, given("ID", "Which engine should answer there.")] = None,
    curve_secret_key: CurveSecretKey = "",
    curve_peer: CurvePeer = "",
    as_json: Json = False,
) -> None:
    """Check whether this machine can move KV cache, and say what to change.

    Tries what can be tried: loads every driver, lets one process read another's memory, binds and
    reaches the addresses that a side channel may have. Looks up the rest: limits, NICs, GPUs, what
    UCX found. With HOST:PORT, checks from here whether a running engine answers: its
    side_channel_host and side_channel_port.

    Exit status 0 unless something is bad. Findings that are only worth knowing do not change the
    exit status.
    """


@_command
def check_config(
    config: Annotated[
        str,
        named(
            "FILE|JSON",
            "The value of --kv-transfer-config, or kv_connector_extra_config: JSON, or a file "
            "with JSON.",
        ),
    ] = "",
    peer: Annotated[
        list[str] | None,
        given("HOST:PORT", "Also ask the side channel of a running engine. Again for another."),
    ] = None,
    schema: Annotated[
        bool, shown("--schema", help="Print the JSON schema of kv_connector_extra_config.")
    ] = False,
) -> None:
    """Check a configuration for vLLM on this host, before an engine starts.

    Checks every setting, starts the driver with its options, reads keys and secrets, and tries
    whether the side channel's address can be bound. Running engines can be asked as well, with the
    keys and networks of the configuration.

    Prints all problems. Exit status 1 if there are any. Needs neither vLLM nor torch.

    \b
    Examples:
      kvferry check-config prefill.json
      kvferry check-config '{"driver": "nixl"}' --peer 10.0.0.5:5600
    """


@_command
def health(
    address: Annotated[list[str], Engine],
    timeout: Timeout = 5.0,
    curve_secret_key: CurveSecretKey = "",
    curve_peer: CurvePeer = "",
) -> None:
    """Ask a running engine for its problems: exit status 0 if it has none.

    For a readiness probe. The engine answers if its side channel is up, and lists the problems that
    its ranks find: a transport that failed, or pages that are quarantined (not reused while bytes
    of a failed read may still arrive in them).
    """


@_command
def revoke(
    address: Annotated[str, Engine],
    conversations: Annotated[
        bool, shown("--conversations", help="Only what is held for a next turn.")
    ] = False,
    timeout: Timeout = 5.0,
    curve_secret_key: CurveSecretKey = "",
    curve_peer: CurvePeer = "",
) -> None:
    """Have a running engine end all that it holds for other engines, at once.

    Its tickets are stale from the engine's next step on: their loads fail, and decode follows its
    kv_load_failure_policy. Prints how many there were. An engine without keys answers on its own
    host only.
    """


@_command
def top(
    addresses: Annotated[
        list[str],
        named("HOST:PORT", "The address of a vLLM server, or the URL of its page of metrics."),
    ],
    interval: Annotated[
        float, shown(min=0.1, help="Seconds between readings; rates are of this time.")
    ] = 3.0,
    timeout: Annotated[
        float, shown(min=0.1, help="The most seconds that an engine may take to answer.")
    ] = 5.0,
    once: Annotated[bool, shown("--once", help="Read twice, print one report, and end.")] = False,
    as_json: Annotated[bool, shown("--json", help="Print each report as a line of JSON.")] = False,
) -> None:
    """Show live who pulls from whom, how fast, what waits and what fails.

    Reads the /metrics of one or several vLLM servers again and again, until Ctrl-C. Prefill and
    decode engines may be given in any order. An engine that does not answer stays in the table with
    the reason. A value that an engine does not have is shown as "-". A count such as "12 +2" is 12
    since the engine started, 2 of them since the last reading. docs/metrics.md explains the tables,
    stages, causes and reasons, and what to do about them.

    \b
    Examples:
      kvferry top 10.0.0.1:8000 10.0.0.2:8000
      kvferry top http://prefill:8000/metrics http://decode:8000/metrics --interval 10
      kvferry top decode:8000 --once --json | jq '.engines[].pulls'

    With --once, the exit status is 1 if an engine did not answer.
    """


@_command
def keygen(
    folder: Annotated[Path, named("DIR", "Where to; made if need be.")],
    engine: Annotated[
        list[str] | None,
        given("NAME", "Make keys for this engine; again for another. By default prefill, decode."),
    ] = None,
) -> None:
    """Make the keys that encrypt side channels, and the secret that signs tickets.

    Writes a pair of keys for each engine, by which engines also recognise each other, and one
    secret for all engines. Prints what to configure on each engine. Only the owner can read the
    files, and no file is overwritten.
    """


@_command
def bench(
    driver: Annotated[str, named("", "Which driver; 'kvferry drivers' lists them.")],
    option: Annotated[
        list[str] | None,
        given(
            "KEY=VALUE",
            "One of its driver_options, the value as JSON or text. Again for another.",
        ),
    ] = None,
    size: Annotated[
        str, shown(metavar="SIZES", help="Bytes that a transfer moves.")
    ] = "1M,16M,64M",
    block: Annotated[
        str, shown(metavar="SIZES", help="Bytes of each of its copies.")
    ] = "4K,64K,1M",
    memory: Annotated[str, shown(help="Kind of both buffers: cpu, cuda, cuda:INDEX.")] = "cpu",
    seconds: Annotated[
        float, shown(min=0, help="About how long to time, all in all; checks come on top.")
    ] = 20.0,
    as_json: Json = False,
    plot: Annotated[
        Path | None, given("FILE", "Draw a picture, .svg or .png (needs kvferry[plot]).")
    ] = None,
) -> None:
    """Measure a driver between two processes, and compare it with memcpy.

    Moves every size in blocks of every size, scattered and in a row. Prints GB/s, microseconds per
    copy, and the speed as a fraction of the speed of a memcpy in the same run. Every byte is
    compared before a case is timed. Needs about six times as much memory as the largest size.

    \b
    Examples:
      kvferry bench loopback --option threads=4
      kvferry bench nixl --size 8,1M --block 8,512,64K --plot nixl.svg
    """


@_command
def new_driver(
    name: Annotated[str, named("", "The name by which users will configure it.")],
) -> None:
    """Write a small driver that works, to make your own of: a distribution with its tests.

    Writes the folder kvferry-NAME: a driver that reads the memory of other processes of this host,
    and the conformance suite for it. docs/writing-a-driver.md begins with it.
    """


@_command
def plan(
    model: Annotated[
        Path | None,
        named(
            "CONFIG",
            "A model's config.json, or its folder. Needed if an engine is given by settings.",
        ),
    ] = None,
    prefill: Annotated[
        str | None,
        given(
            "SETTINGS|FILE",
            "The prefill engine: settings as above, or a JSON file with its layouts.",
        ),
    ] = None,
    decode: Annotated[str | None, given("SETTINGS|FILE", "The decode engine, likewise.")] = None,
    addresses: Annotated[
        list[str] | None,
        given(
            "HOST:PORT",
            "Take the layouts of a running engine from its side channel; then --prefill or "
            "--decode is left out. If given twice, the first is the prefill engine.",
            "--from",
        ),
    ] = None,
    curve_secret_key: CurveSecretKey = "",
    curve_peer: Annotated[
        list[str] | None,
        given("KEY", "A running engine's public key, or its place; one for each --from in order."),
    ] = None,
    tokens: Annotated[int, tokens_option(help="How long the request is.")] = 4096,
    dtype: Annotated[
        str | None, given("", "Element type of the cache, if not the config's.")
    ] = None,
    bandwidth: Annotated[
        list[str] | None,
        given(
            "RATE",
            "What the network carries from prefill to decode in a second, all ranks together: "
            "25Gbit, 100Gbit, 40MB/s. Prints what early tickets would save. Again for another.",
        ),
    ] = None,
    prompt: Annotated[
        list[int] | None,
        given(
            "TOKENS",
            "With --bandwidth: a prompt's length; --tokens if not given. Again for another.",
            min=1,
            max=MOST_TOKENS,
        ),
    ] = None,
    chunk: Annotated[
        int,
        tokens_option(
            help="With --bandwidth: how many tokens prefill computes in a step, vLLM's "
            "max_num_batched_tokens. The default is that of vLLM's server on an H100."
        ),
    ] = 8192,
    prefill_rate: Annotated[
        float,
        shown(
            min=1e-3,
            max=1e12,
            metavar="TOKENS/S",
            help="With --bandwidth: how many tokens prefill computes in a second. Measure yours: a "
            "long prompt's tokens by its time to the first token on an idle engine. The default "
            "fits a model of 70B parameters on eight GPUs of 175 TFLOP/s each in effect.",
        ),
    ] = 10_000.0,
    hop: Annotated[
        float,
        shown(
            min=0,
            max=1e6,
            metavar="MS",
            help="With --bandwidth: from prefill's end until decode starts to read, without early "
            "tickets: the router, and decode's queue. The default understates what is saved.",
        ),
    ] = 0.0,
    svg: Annotated[Path | None, given("FILE", "Draw a picture (needs kvferry[plot]).")] = None,
    as_json: Json = False,
    write_layouts: Annotated[
        Path | None, given("FOLDER", "Write prefill.json and decode.json there.")
    ] = None,
) -> None:
    """Show which decode rank reads what from which prefill rank, in how many copies of which size.

    \b
    SETTINGS are key=value pairs with commas between:
      tp, pp         ranks that share the heads, ranks that share the layers (1)
      dcp            how many of the tp ranks share a request's tokens (1),
      interleave     how many consecutive tokens each of these ranks stores (1)
      block_size     tokens of a page (16)
      layout         how memory is nested: LBHNC (or HND), LBNHC (or NHD), LHBNC, BLHNC, BLNHC,
                     BHLNC; Layers, Blocks, Heads, tokeNs, Content, outermost first (LBNHC)
      kernel_block   tokens of the blocks that kernels split a page into (no split)

    \b
    FILE holds {"ranks": [LAYOUT, ...]}, a kvferry.core.layout.Layout as JSON for each rank, and
    may hold "windows": [TOKENS, ...], the sliding window of each cache group (0: none), and
    "chunks", likewise for chunked attention; --write-layouts writes such files.

    \b
    Examples:
      kvferry plan path/to/model --prefill tp=2,layout=HND --decode tp=1,block_size=32
      kvferry plan --prefill prefill.json --decode decode.json --svg plan.svg
      kvferry plan --from 10.0.0.5:5600 --from 10.0.0.6:5600
      kvferry plan path/to/model --from 10.0.0.5:5600 --decode tp=4
      kvferry plan path/to/model --prefill tp=8 --decode tp=8 --bandwidth 25Gbit

    No engine has to run. CONFIG may be the config of a multimodal model: its text part is read,
    since images become tokens of the same cache. Layers with states (Mamba 1 and 2, gated delta
    nets, KDA, short convolutions) are drawn, too. Draft layers and the scratch memory of
    speculative decoding are left out. Keys that the config leaves out have the defaults of
    transformers for its model_type. A model that its config does not describe completely, such as
    one with a compressed cache, is refused with the key that shows it.

    HOST:PORT is the engine's side_channel_host and side_channel_port. If --from is given,
    layers have vLLM's names.

    The pages of a request are assumed to lie apart, as in an engine that has run for a while, so
    that no two pages are moved by one copy. Where copies are small and both engines are given by
    SETTINGS, other layouts and block sizes are tried, and those that would help are printed. Exit
    status 1 if the two engines cannot exchange pages.

    With --bandwidth, a table follows: how long until decode has a prompt's cache, if it is moved
    after prefill, and if pages are moved chunk by chunk while prefill computes (early tickets).
    """
