"""Run ``kvferry plan`` in this process, on small models."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvferry.cli import main

TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}
"""A model with heads of 8 elements: K and V of one head and token have 32 bytes."""

LATENT: dict[str, Any] = TINY | {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
"""A model with latents of 32 elements, 64 bytes."""

WINDOWS: dict[str, Any] = TINY | {
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


class CommandResult(NamedTuple):
    """The exit status and output of a run of the command."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The printed words, independent of the width of the terminal."""
        return " ".join((self.out + self.err).split())


def write_config(folder: Path, content: object) -> str:
    """Write a config file and return its path."""
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    return str(file)


def run_kvferry(
    capsys: pytest.CaptureFixture[str], *arguments: str, width: int = 200
) -> CommandResult:
    """Run the command in this process."""
    status: Any = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kvferry", *arguments])
        patch.setenv("COLUMNS", str(width))
        try:
            main()
        except SystemExit as exc:
            status = exc.code or 0
    return CommandResult(status, *capsys.readouterr())


def make_plan(
    capsys: pytest.CaptureFixture[str], model: Sequence[str], prefill: str, decode: str, *more: str
) -> dict[str, Any]:
    """Return the output of ``kvferry plan --json``; ``model`` has its path, or is empty."""
    sides = ("--prefill", prefill, "--decode", decode)
    ran = run_kvferry(capsys, "plan", *model, *sides, "--json", *more)
    assert ran.status == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found
