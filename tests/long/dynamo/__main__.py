"""Hand requests over between Dynamo's vLLM workers, through Dynamo's frontend, on the CPU.

    make dynamo
    python -m tests.long.dynamo PYTHON SITE

Every text is compared with that of one vLLM engine without a connector, and decode has to count
every prompt token as transferred.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from examples.tiny_llama import WORDS, build, prompt
from tests.engines.engines import ENVIRONMENT, Engine, EngineError
from tests.long.dynamo.processes import Deployment, DynamoError

LENGTHS = (2, 31, 32, 33, 64, 100, 300, 511)
TOKENS = 24
PULLED = "vllm:prompt_tokens_by_source"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main(arguments: list[str]) -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(prog="make dynamo", description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path, help="of an environment with vLLM and kvferry")
    parser.add_argument("site", type=Path, help="the folder into which Dynamo was installed")
    settings = parser.parse_args(arguments)
    python = settings.python.absolute()
    with tempfile.TemporaryDirectory(prefix="kvferry-dynamo-") as scratch:
        folder = Path(scratch)
        model = _model(folder / "model")
        expected = _reference(python, model, folder)
        try:
            with Deployment(python, settings.site, model, folder) as deployment:
                deployment.wait_started()
                _say("the frontend serves the model, and has found both workers")
                return 0 if _compared(deployment, expected) else 1
        except (DynamoError, EngineError) as exc:
            _say(f"{exc}")
            return 1


def _compared(deployment: Deployment, expected: dict[str, str]) -> bool:
    """Send every prompt once, in one of three ways; return whether answers and counts are right."""
    right = 0
    for ask, (text, wanted) in zip(cycle((_completion, _chat, _streamed_chat)), expected.items()):
        answer = ask(deployment, text)
        right += answer == wanted
        if answer != wanted:
            _say(f"{ask.__name__} of {text!r}:\n  {answer!r} instead of\n  {wanted!r}")
    requests = len(expected)
    tokens = sum(len(text.split()) for text in expected)
    loads = deployment.counter("vllm:kvferry_loads")
    pulled = deployment.counter(PULLED, 'source="external_kv_transfer"')
    _say(f"{right} of {requests} texts are those of one engine")
    _say(f"decode made {loads:.0f} of {requests} loads without a failure")
    _say(f"decode counts {pulled:.0f} of {tokens} prompt tokens as transferred")
    return (right, loads, pulled) == (requests, requests, tokens)


def _completion(deployment: Deployment, text: str) -> str:
    answer = deployment.post("/v1/completions", {"prompt": text, "max_tokens": TOKENS})
    return _words(json.loads(answer)["choices"][0]["text"])


def _chat(deployment: Deployment, text: str) -> str:
    answer = deployment.post("/v1/chat/completions", _message(text))
    return _words(json.loads(answer)["choices"][0]["message"]["content"])


def _streamed_chat(deployment: Deployment, text: str) -> str:
    answer = deployment.post("/v1/chat/completions", _message(text) | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if "{" in line]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return _words("".join(delta.get("content") or "" for delta in deltas))


def _message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}


def _words(text: str) -> str:
    """Return a text without the space before its first word, which one engine leaves out."""
    return " ".join(text.split())


def _model(folder: Path) -> Path:
    """Make the checkpoint, with what Dynamo's frontend asks for beyond vLLM."""
    build(folder)
    _extend(folder / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE})
    _extend(folder / "generation_config.json", {"eos_token_id": 0})
    _extend(folder / "config.json", {"eos_token_id": 0})
    return folder


def _extend(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def _reference(python: Path, model: Path, folder: Path) -> dict[str, str]:
    """Return prompts as text, with what one engine without a connector answers."""
    os.environ.update(ENVIRONMENT | {"VLLM_CACHE_ROOT": str(folder / "cache")})
    prompts = [prompt(length, seed) for length in LENGTHS for seed in range(3)]
    engine = Engine("reference", model, folder, python=python).wait_started()
    try:
        answers = engine.generate(*prompts, max_tokens=TOKENS)
    finally:
        engine.close()
    return {_text(each): _words(answer.text) for each, answer in zip(prompts, answers, strict=True)}


def _text(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
