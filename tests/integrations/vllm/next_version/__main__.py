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

from tests.integrations.vllm.next_version import caches, hooks, names
from tests.integrations.vllm.next_version.comparison import findings, page
from tests.integrations.vllm.next_version.sdist import SdistError, fetch
from tests.integrations.vllm.next_version.source import Source
from tests.integrations.vllm.next_version.verdicts import VERDICTS
from tests.vllm.caches.census import installed

FOLDER = Path(__file__).resolve().parents[4] / ".cache" / "vllm-next"
SECTIONS = (*hooks.SECTIONS, *caches.SECTIONS, *names.SECTIONS)


def main(arguments: list[str]) -> int:
    """Fetch, compare and print; return the exit status: 0 if the version was compared."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.integrations.vllm.next_version", description=__doc__.splitlines()[0]
    )
    parser.add_argument("version", help="such as 0.33.0, or the folder of a package vllm")
    parser.add_argument("--base", help="the other version; by default, the installed one")
    settings = parser.parse_args(arguments)
    try:
        old, new = map(_source, (settings.base or Source(installed()).version, settings.version))
    except SdistError as exc:
        sys.stdout.write(f"{exc}\n")
        return 1
    found = {
        section: findings(section, old, new, VERDICTS.get(section.title, {}))
        for section in SECTIONS
    }
    sys.stdout.write(page(found, f"{new.version} beside {old.version}"))
    for section, some in found.items():
        used = {(each.name, each.verdict) for each in some}
        for unused in VERDICTS.get(section.title, {}).items() - used:
            sys.stdout.write(f"verdicts.py has an entry that nothing needs: {unused[0]}\n")
    return 0


def _source(version: str) -> Source:
    """Return the source of a version, which is fetched unless it is a folder's name."""
    folder = Path(version)
    if not (folder / "_version.py").is_file():
        folder = fetch("vllm", version, FOLDER) / "vllm"
    return Source(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
