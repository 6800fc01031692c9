"""Requests are handed over between Dynamo's vLLM workers, through Dynamo's frontend, on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engines import CONNECTOR, ENVIRONMENT, OPTIONS, PATIENT, ROOT, Engine
from tests.engines.http_server import Program, command_line, get, metric
from tests.free_port import free_port
from tests.long.routers.questions import MAX_TOKENS, TEMPLATE, ask_all, mixture

MODEL = "tiny"
PYTHON = ROOT / "build" / "versions" / "0.31.0" / "bin" / "python"
SITE = ROOT / "build" / "dynamo"
START_SECONDS = 280.0
"""A worker imports vLLM in three processes, one after the other."""
REQUESTS = 24

pytestmark = pytest.mark.timeout(2 * START_SECONDS)

Deployment = dict[str, Program]
"""A frontend, prefill and decode, which find each other by files: no etcd or NATS runs."""


@pytest.fixture(scope="module")
def deployment(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The frontend routes by prefix: the workers publish what they cache."""
    folder = tmp_path_factory.mktemp("dynamo")
    model = make_model(checkpoint, folder / "model")
    path = (Path(__file__).parent / "stand_ins", SITE, ROOT)
    common = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "TMPDIR": str(folder),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }

    def start(name: str, *arguments: str, port: int) -> Program:
        environment = os.environ | ENVIRONMENT | common | {"DYN_SYSTEM_PORT": str(port)}
        command: list[str | Path] = [PYTHON, "-m", *arguments]
        return Program(name, command, port, "/health", folder, environment)

    port = free_port()
    frontend = ("dynamo.frontend", "--http-port", str(port), "--router-mode", "kv")
    found = {"frontend": start("frontend", *frontend, port=port)}
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        found[name] = start(name, *worker(name, role, model), port=free_port())
    try:
        wait_started(found)
        yield found
    finally:
        for each in found.values():
            each.close()


def make_model(checkpoint: Path, folder: Path) -> Path:
    """Copy the checkpoint, with what Dynamo's frontend asks for beyond vLLM."""
    shutil.copytree(checkpoint, folder)
    for name, more in (
        ("tokenizer_config", {"chat_template": TEMPLATE}),
        ("generation_config", {"eos_token_id": 0}),
        ("config", {"eos_token_id": 0}),
    ):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


def worker(name: str, role: str, model: Path) -> list[str]:
    """Return the arguments of a worker, those of ``vllm serve`` among them."""
    options = OPTIONS | {
        "model": str(model),
        "served_model_name": MODEL,
        "enable_prefix_caching": True,
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{free_port()}",
        },
        "kv_transfer_config": CONNECTOR
        | {
            "kv_role": role,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": PATIENT,
        },
    }
    ours = [each for each in command_line(options) if not each.startswith(("--host", "--port"))]
    return ["dynamo.vllm", "--disaggregation-mode", name, *ours]


def wait_started(deployment: Deployment) -> None:
    """Return when the frontend serves the model and has found both workers."""
    deadline, frontend = time.monotonic() + START_SECONDS, deployment["frontend"]

    def serves() -> bool:
        if not all(each.answers() for each in deployment.values()):  # raises if one has ended
            return False
        models, health = (get(frontend.address + path) for path in ("/v1/models", "/health"))
        return f'"{MODEL}"' in models and "dynamo.prefill.generate" in health

    while not serves():
        logs = "\n".join(each.log()[-3000:] for each in deployment.values())
        assert time.monotonic() < deadline, logs
        time.sleep(0.5)


@pytest.mark.skipif(not (PYTHON.exists() and SITE.exists()), reason="`make dynamo` installs it")
def test_every_text_is_right_and_every_prompt_is_pulled(
    reference: Engine, deployment: Deployment
) -> None:
    """Chat and completions, streamed and whole; the space before the first word aside."""
    questions, decode = mixture(REQUESTS, shortest=2), deployment["decode"]
    answers = ask_all(deployment["frontend"].address, questions, MODEL)
    prompts = [question.prompt for question in questions]
    expected = reference.generate(*prompts, max_tokens=MAX_TOKENS)
    for answer, right in zip(answers, expected, strict=True):
        assert answer.text.split() == right.text.split(), f"{answer}\n{decode.log()[-3000:]}"
    assert metric(decode.address, "vllm:kvferry_loads_total", "") == REQUESTS
    source = 'source="external_kv_transfer"'
    pulled = metric(decode.address, "vllm:prompt_tokens_by_source_total", source)
    assert pulled == sum(map(len, prompts))
