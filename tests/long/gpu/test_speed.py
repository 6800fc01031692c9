"""``benchmarks/gpu.py`` for one driver; UCX says in the log which way the bytes go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import row_of
from tests.long.gpu.conftest import DRIVER, FAR, NEAR, Table
from tests.long.gpu.device import Device

TCP_SIZE = ("--megabytes", "64", "--rounds", "10")
"""Smaller than the script's own: over tcp, small blocks may take seconds."""


@pytest.mark.parametrize(
    "options", [(), ("--staged", "--tcp", *TCP_SIZE)], ids=["direct", "tcp_staged_beside_direct"]
)
def test_beside_a_plain_copy(
    device: Device, table: Table, tmp_path: Path, options: tuple[str, ...]
) -> None:
    file, is_cuda = tmp_path / "rows.json", device.is_cuda
    command = [sys.executable, "-m", "benchmarks.gpu", "--path", "--json", str(file)]
    command += ["--driver", DRIVER, "--near", NEAR, "--far", FAR]
    command += options if is_cuda else [*options[:2], "--quick"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3], env=os.environ)
    for row in map(row_of, json.loads(file.read_text(encoding="utf-8"))):
        figures = {"case": row.case, "measured": row.measured, "95 %": row.interval}
        table(row.section, figures | {f"ratio to {row.of}": f"{row.ratio:g}"})
