"""Run one step in this process: ``python -m benchmarks.gpu_check.step``, started by ``runner``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

from .outcome import Outcome, Settings


def main(module: str, settings: str, file: str) -> None:
    """Run a step, write its outcome, and end the process.

    Args:
        module: the module of this package whose ``run`` is the step.
        settings: the fields of ``Settings``, as JSON.
        file: where the outcome goes.
    """
    try:
        step = importlib.import_module(f"{__package__}.{module}")
        outcome: Outcome = step.run(Settings(**json.loads(settings)))
    except Exception as exc:  # noqa: BLE001 - the page shows it, and the log has the traceback
        traceback.print_exc()
        outcome = Outcome(problems=[f"{type(exc).__name__}: {exc}"[:1000]])
    outcome.write(Path(file))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some transport libraries crash in their exit handlers


if __name__ == "__main__":
    main(*sys.argv[1:])
