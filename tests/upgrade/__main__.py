"""Let engines of an older commit and of this tree hand over to each other.

    make upgrade FROM=<commit>
    python -m tests.upgrade <commit> [--drivers loopback,ucx,nixl] [--vllm loopback,ucx,nixl]

The older commit is unpacked into a temporary folder. Each side runs its own code in a process of
its own, in this environment.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from tests.upgrade import hand_over, vllm_pair
from tests.upgrade.child import ChildError
from tests.upgrade.report import Report
from tests.upgrade.trees import Tree, TreeError, described, older_tree, this_tree

PROMISED = """\
Promised: pages go from either engine to the other, with every kind of ticket that is made."""


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make upgrade", description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the older commit")
    every = ",".join(hand_over.WAYS)
    parser.add_argument(
        "--drivers", default=every, help="over which endpoints hand over; all unless named"
    )
    parser.add_argument(
        "--vllm", default=every, help="over which vLLM engines do; 'none' for no engines"
    )
    found = parser.parse_args(arguments)
    found.drivers = _listed(found.drivers, parser)
    found.vllm = _listed(found.vllm, parser)
    return found


def _listed(names: str, parser: argparse.ArgumentParser) -> list[str]:
    listed = [] if names == "none" else names.split(",")
    for name in listed:
        if name not in hand_over.WAYS:
            parser.error(f"{name!r} is no driver: {', '.join(hand_over.WAYS)}")
    return listed


def check_all(old: Tree, new: Tree, settings: argparse.Namespace) -> bool:
    report = Report()
    report.say(f"old: {described(settings.commit)}\nnew: {new.root}\n")
    report.say(PROMISED)
    for driver in settings.drivers:
        hand_over.check_driver(old, new, driver, report)
    for driver in settings.vllm:
        vllm_pair.check(old, new, driver, report)
    return report.conclude()


def _ended(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: list[str]) -> int:
    settings = parsed(arguments)
    signal.signal(signal.SIGTERM, _ended)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # shells have background jobs ignore it
    with tempfile.TemporaryDirectory(prefix="kvferry-upgrade-") as folder:
        try:
            old, new = older_tree(settings.commit, Path(folder)), this_tree(Path(folder))
            return 0 if check_all(old, new, settings) else 1
        except (TreeError, ChildError) as exc:
            sys.stderr.write(f"{exc}\n")
            return 2
        except KeyboardInterrupt:
            sys.stderr.write("\ninterrupted: everything that was started has ended\n")
            return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
