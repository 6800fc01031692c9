"""A prompt prefilled by a vLLM engine of one tree and decoded by one of the other."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.tiny_llama import prompt
from tests.engines.engines import ENVIRONMENT, OPTIONS, PREFILL
from tests.upgrade.child import Child, ChildError, closing_all
from tests.upgrade.report import Report
from tests.upgrade.trees import ROOT, Tree

Params = dict[str, Any] | None
"""``kv_transfer_params``."""

ENGINE = Path(__file__).with_name("engine.py")
LENGTHS = (5, 31, 32, 33, 100, 256, 300)
TOKENS = 16
START_SECONDS, ANSWER_SECONDS = 600.0, 300.0
QUIET = {"VLLM_LOGGING_LEVEL": "WARNING"}


def check(old: Tree, new: Tree, driver: str, report: Report) -> None:
    """Hand prompts over in both directions, and compare with the texts of one engine alone."""
    report.heading(f"vLLM engines over {driver} (they take a minute or two to start)")
    try:
        with _engines(old, new, driver) as engines:
            prompts = [prompt(length) for length in LENGTHS]
            alone = {
                name: _answers(child, prompts, [None] * len(prompts))
                for name, child in engines.items()
            }
            texts = _texts(alone["new"])
            report.check("both engines give the same texts alone", _texts(alone["old"]) == texts)
            for source, target in itertools.permutations(engines):
                _check_way(source, target, engines, prompts, texts, report)
    except ChildError as exc:
        report.check("neither engine fails", False, str(exc))


def _check_way(
    source: str,
    target: str,
    engines: dict[str, Child],
    prompts: list[list[int]],
    texts: list[list[int]],
    report: Report,
) -> None:
    asked: list[Params] = [PREFILL] * len(prompts)
    made = _answers(engines[source], prompts, asked, tokens=1)["answers"]
    # A router passes tickets on as JSON.
    tickets = [json.loads(json.dumps(answer["params"])) for answer in made]
    before = _answers(engines[target], [prompt(1)], [None], tokens=1)["pulled"]
    found = _answers(engines[target], prompts, tickets)
    reasons = sorted({answer["finish_reason"] for answer in found["answers"]})
    report.check(
        f"{source} to {target}: every text is that of one engine alone",
        _texts(found) == texts,
        f"they ended by {', '.join(reasons)}:\n{engines[target].tail()}",
    )
    pulled = int(found["pulled"] - before)
    report.check(
        f"{source} to {target}: every prompt token came through the transfer",
        pulled == sum(map(len, prompts)),
        f"{pulled} of {sum(map(len, prompts))} did",
    )


def _answers(
    child: Child, prompts: list[list[int]], params: list[Params], *, tokens: int = TOKENS
) -> dict[str, Any]:
    requests = [
        {"prompt": ids, "tokens": tokens, "params": each}
        for ids, each in zip(prompts, params, strict=True)
    ]
    found: dict[str, Any] = child.ask("generate", patience=ANSWER_SECONDS, requests=requests)
    return found


def _texts(found: dict[str, Any]) -> list[list[int]]:
    return [answer["tokens"] for answer in found["answers"]]


@contextmanager
def _engines(old: Tree, new: Tree, driver: str) -> Iterator[dict[str, Child]]:
    """Yield an engine of either tree, each for both roles."""
    model = _model(new.scratch / "tiny-llama")
    transfer = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",  # nothing is quietly computed again
        "kv_connector_extra_config": {"driver": driver},
    }
    engines: dict[str, Child] = {}
    with closing_all(engines.values()):
        for tree in (old, new):
            settings = OPTIONS | {"model": str(model), "kv_transfer_config": transfer}
            engines[tree.name] = Child(tree, ENGINE, settings, ENVIRONMENT | QUIET)
        for tree in (old, new):
            source = engines[tree.name].answer(START_SECONDS)["source"]
            if not source.startswith(f"{tree.root}/"):
                raise ChildError(f"the {tree.name} engine runs {source}")
        yield engines


def _model(folder: Path) -> Path:
    """Make a tiny Llama, once, in a process of its own: torch takes seconds to import."""
    if not folder.exists():
        command = [sys.executable, str(ROOT / "examples" / "tiny_llama.py"), str(folder)]
        subprocess.run(command, check=True, capture_output=True)
    return folder
