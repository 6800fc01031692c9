"""Small models, and ``kvferry plan`` run on them."""

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
"""Heads of 8 elements: one head of one token, K and V, has 32 bytes."""

LATENT: dict[str, Any] = TINY | {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
"""Latents of 32 elements, 64 bytes."""

WINDOWS: dict[str, Any] = TINY | {
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


class Ran(NamedTuple):
    """What a run of the command gave."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it printed, whatever the width."""
        return " ".join((self.out + self.err).split())


def config(folder: Path, content: object) -> str:
    """The path of a config file with this content."""
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    return str(file)


def kvferry(capsys: pytest.CaptureFixture[str], *arguments: str, width: int = 200) -> Ran:
    """Run the command in this process."""
    status: Any = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kvferry", *arguments])
        patch.setenv("COLUMNS", str(width))
        try:
            main()
        except SystemExit as exc:
            status = exc.code or 0
    return Ran(status, *capsys.readouterr())


def planned(
    capsys: pytest.CaptureFixture[str], model: Sequence[str], prefill: str, decode: str, *more: str
) -> dict[str, Any]:
    """What ``kvferry plan --json`` says; ``model`` is its path, or empty."""
    sides = ("--prefill", prefill, "--decode", decode)
    ran = kvferry(capsys, "plan", *model, *sides, "--json", *more)
    assert ran.status == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found
