"""Compare a vLLM that is not installed with the installed one, by their source.

    python -m tests.integrations.vllm.next_version <version>

The source distributions of both versions are fetched from the package index that pip uses, and kept
under ``.cache``. Nothing of them is built, imported or run. What is printed has every difference
that may matter to the connector, and says which of them nobody has looked at yet.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.integrations.vllm.next_version.report import (
    compared,
    open_findings,
    page,
    unused_verdicts,
)
from tests.integrations.vllm.next_version.sdist import SdistError, fetch
from tests.integrations.vllm.next_version.source import Source
from tests.vllm.caches.census import installed

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / ".cache" / "vllm-next"


def main(arguments: list[str]) -> int:
    """Fetch, compare and print.

    Returns:
        The exit status: 0 if the version was compared, whatever came of it.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.integrations.vllm.next_version", description=__doc__.splitlines()[0]
    )
    parser.add_argument("version", help="such as 0.33.0, or the folder of a package vllm")
    parser.add_argument("--base", help="the other version; by default, the installed one")
    settings = parser.parse_args(arguments)
    try:
        old = Source(_package(settings.base or Source(installed()).version))
        new = Source(_package(settings.version))
    except SdistError as exc:
        _say(f"{exc}")
        return 1
    sections = compared(old, new)
    _say(page(old, new, sections))
    for name in unused_verdicts(sections):
        _say(f"verdicts.py has an entry that nothing needs: {name}")
    _say(f"{len(open_findings(sections))} differences have no verdict yet")
    return 0


def _package(version: str) -> Path:
    """Return the folder of a version's package ``vllm``.

    Args:
        version: A version, whose source distribution is fetched; or the folder itself.

    Raises:
        SdistError: There is no such source distribution.
    """
    folder = Path(version)
    if (folder / "_version.py").is_file():
        return folder
    return fetch("vllm", version, FOLDER) / "vllm"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
