"""A real vLLM engine in a process of its own, that answers requests over a pipe.

``make upgrade`` runs this file with the code of either tree. It asks nothing of kvferry but what
``kv_transfer_config`` names, so one program serves all trees.

One JSON object a line comes in on stdin, and one goes out on stdout: first the arguments of
``vllm.LLM``, then batches of requests.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Engine:
    """vLLM, as anybody gets it. Its methods are the commands."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(**arguments.pop("kv_transfer_config"))
        self._llm = LLM(kv_transfer_config=transfer, **arguments)

    def facts(self) -> dict[str, Any]:
        import kvferry

        return {"source": kvferry.__file__}

    def generate(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=request["tokens"],
                ignore_eos=True,
                extra_args={"kv_transfer_params": request["params"]} if request["params"] else None,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        answers = [
            {
                "tokens": list(output.outputs[0].token_ids),
                "finish_reason": str(output.outputs[0].finish_reason),
                "params": output.kv_transfer_params,
            }
            for output in self._llm.generate(prompts, sampling, use_tqdm=False)
        ]
        return {"answers": answers, "pulled": self._pulled()}

    def _pulled(self) -> float:
        return sum(
            float(metric.value)
            for metric in self._llm.get_metrics()
            if metric.name == "vllm:prompt_tokens_by_source"
            and metric.labels.get("source") == "external_kv_transfer"
        )


def main() -> None:
    """Serve over stdin and stdout; whatever else is printed goes to stderr."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(answer: dict[str, Any]) -> None:
        replies.write(json.dumps({"answer": answer}) + "\n")
        replies.flush()

    engine = Engine(json.loads(sys.stdin.readline()))
    reply(engine.facts())
    for line in sys.stdin:
        message = json.loads(line)
        reply(getattr(engine, message.pop("do"))(**message))


if __name__ == "__main__":
    main()
