"""Run prefill and decode as Ray deployments on this machine, without a GPU or a download.

    python examples/ray_serve/local.py

The applications are that of serve.yaml, changed for vLLM's CPU build and a tiny Llama, and a single
ordinary engine beside it. Both get the same requests through Ray Serve's HTTP. The script ends with
status 0 only if all texts are equal.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tiny_llama

SERVE_YAML = Path(__file__).resolve().with_name("serve.yaml")

PORT = 8000
LENGTHS = (5, 33, 64, 300)

# What vLLM's CPU build needs on one small machine.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 512,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make_model(folder: Path) -> Path:
    """Make the tiny Llama, with a template for chats that is only the text of the messages."""
    tiny_llama.build(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def arguments(model: Path) -> dict[str, Any]:
    """Return the arguments of serve.yaml's application, changed for CPUs and the tiny Llama."""
    import yaml

    [application] = yaml.safe_load(SERVE_YAML.read_text())["applications"]
    # Aliases of YAML are one object; each deployment needs its own.
    changed: dict[str, Any] = copy.deepcopy(application["args"])
    for name in ("prefill_config", "decode_config"):
        config = changed[name]
        del config["accelerator_type"]
        transfer = config["engine_kwargs"]["kv_transfer_config"]
        transfer["kv_connector_extra_config"]["driver"] = "loopback"
        # What could not be loaded shall be an error here, not be computed again without a word.
        transfer["kv_load_failure_policy"] = "fail"
        config |= {
            "model_loading_config": {"model_id": "tiny", "model_source": str(model)},
            "accelerator_config": {"kind": "cpu"},
            "runtime_env": {"env_vars": ENVIRONMENT},
            "engine_kwargs": {**ENGINE, "kv_transfer_config": transfer},
        }
    return changed


def single_engine(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an application that is one ordinary engine of that model."""
    config = copy.deepcopy(arguments["decode_config"])
    del config["engine_kwargs"]["kv_transfer_config"]
    config["deployment_config"] = {"num_replicas": 1}
    return {"llm_configs": [config]}


def ask(path: str, body: dict[str, Any], port: int = PORT) -> str:
    """Post a completion or a chat; return the text of the answer, joined if it was streamed."""
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True} | body
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    if not body.get("stream"):
        return _text(json.loads(text)["choices"])
    events = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: {")]
    return "".join(_text(json.loads(event)["choices"]) for event in events)


def _text(choices: list[dict[str, Any]]) -> str:
    if not choices:
        return ""
    [choice] = choices
    message = choice.get("message") or choice.get("delta") or choice
    return str(message.get("content") or message.get("text") or "")


def every_way(length: int, seed: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """Return path and body of one prompt as a completion and as a chat, whole and streamed."""
    words = " ".join(tiny_llama.WORDS[token] for token in tiny_llama.prompt(length, seed))
    completion = "/v1/completions", {"prompt": words}
    chat = "/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}
    return [
        (path, body | {"stream": stream})
        for path, body in (completion, chat)
        for stream in (False, True)
    ]


def main() -> None:
    """Deploy both applications, ask both, and compare the texts."""
    import ray
    from ray import serve
    from ray.serve.llm import build_openai_app

    from kvferry.integrations.ray import build_pd_openai_app

    with tempfile.TemporaryDirectory() as folder:
        args = arguments(make_model(Path(folder)))
        # Ray takes each replica for two CPUs. They are small: so many fit on any machine.
        ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        print("Starting one ordinary engine, and one prefill and one decode replica ...")
        single = build_openai_app(single_engine(args))
        pair = build_pd_openai_app(args)
        serve.run_many(
            [
                serve.RunTarget(single, name="single", route_prefix="/single"),
                serve.RunTarget(pair, name="llm", route_prefix="/"),
            ]
        )
        equal = True
        for length in LENGTHS:
            for path, body in every_way(length):
                expected, text = ask(f"/single{path}", body), ask(path, body)
                equal = equal and text == expected
                verdict = "as of one engine" if text == expected else f"not {expected!r}"
                streamed = "streamed" if body["stream"] else "whole"
                print(f"{length:4} tokens  {path:21} {streamed:9} {verdict}: {text.strip()[:40]}")
        serve.shutdown()
        ray.shutdown()
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
