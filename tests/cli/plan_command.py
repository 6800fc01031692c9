"""Run ``kvferry plan`` in this process, on small models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.command import Command, CommandResult

Config = dict[str, Any]

TINY: Config = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}
"""A model with heads of 8 elements: K and V of one head and token have 32 bytes."""
LATENT: Config = TINY | {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
"""A model with latents of 32 elements, 64 bytes."""
WINDOWS: Config = TINY | {
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def write_config(folder: Path, content: object) -> str:
    """Write a config file and return its path."""
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    return str(file)


@dataclass(frozen=True)
class PlanCommand:
    """``kvferry plan``, with files in a folder. Arguments that are empty are left out."""

    folder: Path
    command: Command

    def between(
        self, model: Config | None, prefill: str, decode: str, *more: str, width: int = 0
    ) -> CommandResult:
        """Run the command for a model's config and two engines."""
        config = [write_config(self.folder, model)] if model else []
        sides = [f"--prefill={prefill}"] * bool(prefill) + [f"--decode={decode}"] * bool(decode)
        return self.command.run("plan", *config, *sides, *more, width=width)

    def text(
        self, model: Config | None, prefill: str = "tp=1", decode: str = "tp=1", *more: str
    ) -> str:
        """Return the words that the command prints."""
        ran = self.between(model, prefill, decode, *more)
        assert ran.status == 0, ran.err
        return ran.words

    def json(
        self, model: Config | None, prefill: str = "tp=1", decode: str = "tp=1", *more: str
    ) -> dict[str, Any]:
        """Return what the command prints with ``--json``."""
        ran = self.between(model, prefill, decode, "--json", *more)
        assert ran.status == 0, ran.err
        found: dict[str, Any] = json.loads(ran.out)
        return found

    def refusal(
        self, model: Config | None, prefill: str = "tp=1", decode: str = "tp=1", *more: str
    ) -> str:
        """Return the error of a command that fails."""
        ran = self.between(model, prefill, decode, *more)
        assert (ran.status, ran.err[:9], "Traceback" in ran.err) == (1, "kvferry: ", False), ran.err
        return ran.err

    def layouts(
        self, model: Config, prefill: str = "tp=1", decode: str = "tp=1", *more: str
    ) -> tuple[str, str]:
        """Write the layouts of two engines, and return the paths of the files."""
        self.json(model, prefill, decode, f"--write-layouts={self.folder}", *more)
        return str(self.folder / "prefill.json"), str(self.folder / "decode.json")
