"""Options that several subcommands share, and those of ``kvferry plan``, which has many.

Like ``commands``, this module imports nothing but typer.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

option = partial(typer.Option, show_default=False)
argument = partial(typer.Argument, show_default=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
CurveSecretKey = Annotated[
    str,
    option(
        metavar="PLACE",
        help="Where this command's own secret key is, for a side channel with keys: file:PATH or "
        "env:NAME. The engine's curve_peers has to list the public one.",
    ),
]
CurvePeer = Annotated[str, option(metavar="KEY", help="That engine's public key, or its place.")]

# Of ``kvferry plan``.

ModelConfig = Annotated[
    Path | None,
    argument(
        metavar="CONFIG",
        help="A model's config.json, or its folder. Needed if an engine is given by settings.",
    ),
]
PrefillEngine = Annotated[
    str | None,
    option(
        metavar="SETTINGS|FILE",
        help="The prefill engine: settings as above, or a JSON file with its layouts.",
    ),
]
DecodeEngine = Annotated[
    str | None, option(metavar="SETTINGS|FILE", help="The decode engine, likewise.")
]
RunningEngines = Annotated[
    list[str] | None,
    option(
        "--from",
        metavar="HOST:PORT",
        help="Take the layouts of a running engine from its side channel; then --prefill or "
        "--decode is left out. If given twice, the first is the prefill engine.",
    ),
]
CurvePeers = Annotated[
    list[str] | None,
    option(
        metavar="KEY",
        help="The public key of a running engine, or its place; one for each --from in "
        "their order.",
    ),
]
Tokens = partial(typer.Option, min=1, max=1 << 24)
RequestTokens = Annotated[int, Tokens(help="How long the request is.")]
CacheDtype = Annotated[str | None, option(help="Element type of the cache, if not the config's.")]
Bandwidths = Annotated[
    list[str] | None,
    option(
        metavar="RATE",
        help="What the network carries from prefill to decode in a second, all ranks together: "
        "25Gbit, 100Gbit, 40MB/s. Prints what early tickets would save. Again for another.",
    ),
]
Prompts = Annotated[
    list[int] | None,
    Tokens(
        metavar="TOKENS",
        help="With --bandwidth: a prompt's length; --tokens if not given. Again for another.",
    ),
]
ChunkTokens = Annotated[
    int,
    Tokens(
        help="With --bandwidth: how many tokens prefill computes in a step, vLLM's "
        "max_num_batched_tokens. The default is that of vLLM's server on an H100."
    ),
]
PrefillRate = Annotated[
    float,
    typer.Option(
        min=1e-3,
        max=1e12,
        metavar="TOKENS/S",
        help="With --bandwidth: how many tokens prefill computes in a second. Measure yours: a "
        "long prompt's tokens by its time to the first token on an idle engine. The default "
        "fits a model of 70B parameters on eight GPUs of 175 TFLOP/s each in effect.",
    ),
]
HopMilliseconds = Annotated[
    float,
    typer.Option(
        min=0,
        max=1e6,
        metavar="MS",
        help="With --bandwidth: from prefill's end until decode starts to read, without early "
        "tickets: the router, and decode's queue. The default, none, understates what is saved.",
    ),
]
PictureFile = Annotated[
    Path | None, option(metavar="FILE", help="Draw a picture (needs kvferry[plot]).")
]
LayoutsFolder = Annotated[
    Path | None, option(metavar="FOLDER", help="Write prefill.json and decode.json there.")
]
