"""A prompt prefilled by a vLLM engine of one tree and decoded by one of the other."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from examples.tiny_llama import build, prompt
from tests.engines import engines
from tests.engines.engines import EngineError, run_apart
from tests.engines.fleet import fleet
from tests.engines.steps import pulled_by, texts
from tests.upgrade.report import Report
from tests.upgrade.trees import ROOT, Tree

LENGTHS = (5, 31, 32, 33, 100, 256, 300)


def check(old: Tree, new: Tree, driver: str, report: Report) -> None:
    """Hand prompts over in both directions, and compare with the texts of one engine alone."""
    report.heading(f"vLLM engines over {driver} (they take a minute or two to start)")
    folder = new.scratch / f"vllm-{driver}"
    folder.mkdir()
    engines.prepare({"VLLM_CACHE_ROOT": str(folder), "TMPDIR": str(folder)})
    run_apart(build, folder / "model")
    try:
        with fleet(folder / "model", folder, python=Path(sys.executable)) as launched:
            both = [
                launched.launch(tree.name, "kv_both", {"driver": driver}, path=_path(tree))
                for tree in (old, new)
            ]
            launched.wait_started()
            for engine, tree in zip(both, (old, new), strict=True):
                report.check(
                    f"the {tree.name} engine runs its tree", engine.run(_source) == str(tree.root)
                )
            prompts = [prompt(length) for length in LENGTHS]
            expected = texts(both[1], *prompts)
            for source, target in itertools.permutations(both):
                way, before = f"{source.name} to {target.name}", pulled_by(target)
                got = texts(target, *prompts, params=source.prefill(*prompts))
                report.check(f"{way}: every text is right", got == expected, target.log()[-4000:])
                pulled = pulled_by(target) - before
                report.check(f"{way}: every prompt token was pulled", pulled == sum(LENGTHS))
    except EngineError as exc:
        report.check("neither engine fails", False, str(exc))


def _path(tree: Tree) -> str:
    """The path with a tree's kvferry, and the tests of this one, which steer the engine."""
    only = tree.scratch / "only"
    if not only.exists():
        only.mkdir()
        (only / "kvferry").symlink_to(tree.root / "kvferry")
    return os.pathsep.join(map(str, (tree.metadata, only, ROOT)))


def _source(engine: object) -> str:
    import kvferry

    return str(Path(kvferry.__file__).resolve().parents[1])
