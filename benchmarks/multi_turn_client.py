"""The clients of vLLM's multi-turn benchmark, in a process that imports them once.

    python multi_turn_client.py FOLDER MODEL

FOLDER has ``benchmark_serving_multi_turn.py`` of vLLM's source distribution. This runs the part of
the script that sends requests and takes times (``client_main``), as one client with
``--send-conversation-id``, and not the part that starts clients, which now and then loses a sample.

Every line of the input is a JSON object with ``url`` and ``conversations``. Every line of the
output is a list with the script's ``RequestStats`` of each request. What the script itself has to
say goes to stderr.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import queue
import sys
import threading
import types
from typing import Any

SECONDS = 120
"""The longest that a request may take."""


def main() -> None:
    folder, model = sys.argv[1:]
    output, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    tokenizer = _tokenizer(model)  # before the stand-in for pandas, at which some would look
    client = _load(folder)
    print(json.dumps("ready"), file=output, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = _run(client, tokenizer, model, asked["url"], asked["conversations"])
        print(json.dumps(answer), file=output, flush=True)


def _load(folder: str) -> Any:
    """Import the script.

    Its tables need pandas, and nothing else of it does: an empty module stands for pandas.
    """
    sys.path.insert(0, folder)
    importlib.import_module("vllm.benchmarks.lib.utils")
    absent = importlib.util.find_spec("pandas") is None
    if absent:
        sys.modules["pandas"] = types.ModuleType("pandas")
    client = importlib.import_module("benchmark_serving_multi_turn")
    if absent:
        del sys.modules["pandas"]
    return client


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _run(
    client: Any, tokenizer: Any, model: str, url: str, conversations: dict[str, Any]
) -> list[dict[str, Any]]:
    arguments = client.ClientArgs(
        seed=0,
        max_num_requests=None,
        skip_first_turn=False,
        max_turns=None,
        max_active_conversations=1,
        verbose=False,
        print_content=False,
        verify_output=False,
        conversation_sampling=client.ConversationSampling.ROUND_ROBIN,
        request_rate=0,
        max_retries=0,
    )
    requests = client.RequestArgs(
        chat_url=f"{url}/v1/chat/completions",
        model=model,
        stream=True,
        limit_min_tokens=client.NUM_TOKENS_FROM_DATASET,
        limit_max_tokens=client.NUM_TOKENS_FROM_DATASET,
        timeout_sec=SECONDS,
        send_conversation_id=True,
        headers={},
    )
    tasks, results = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    for task in (*conversations.items(), (client.TERM_SIGNAL, client.TERM_SIGNAL)):
        tasks.put(task)
    stop = threading.Event()
    asyncio.run(
        client.client_main(
            arguments, requests, 0, tokenizer, stop, tasks, results, queue.SimpleQueue[Any]()
        )
    )
    return [results.get()._asdict() for _ in range(results.qsize())]


if __name__ == "__main__":
    main()
