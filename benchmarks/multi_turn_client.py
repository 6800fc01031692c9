"""The client of vLLM's multi-turn benchmark, for a process that imports it once.

This runs the part of ``benchmark_serving_multi_turn.py`` that sends requests and takes times
(``client_main``), as one client with ``--send-conversation-id``, and not the part that starts
clients, which now and then loses a sample.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import queue
import sys
import threading
import types
from pathlib import Path
from typing import Any

SECONDS = 120  # the longest that a request may take


class Client:
    """Has conversations, by the script in a folder of vLLM's source distribution."""

    def __init__(self, folder: Path, model: Path, log: Path) -> None:
        with log.open("wb") as file:
            for output in (1, 2):
                os.dup2(file.fileno(), output)
        from transformers import AutoTokenizer

        # Before the stand-in for pandas, at which some would look.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._script, self._model = _load(folder), str(model)

    def run(self, url: str, conversations: dict[str, Any]) -> list[dict[str, Any]]:
        """Have some conversations; the script's ``RequestStats`` of each request."""
        script = self._script
        arguments = script.ClientArgs(
            seed=0,
            max_num_requests=None,
            skip_first_turn=False,
            max_turns=None,
            max_active_conversations=1,
            verbose=False,
            print_content=False,
            verify_output=False,
            conversation_sampling=script.ConversationSampling.ROUND_ROBIN,
            request_rate=0,
            max_retries=0,
        )
        requests = script.RequestArgs(
            chat_url=f"{url}/v1/chat/completions",
            model=self._model,
            stream=True,
            limit_min_tokens=script.NUM_TOKENS_FROM_DATASET,
            limit_max_tokens=script.NUM_TOKENS_FROM_DATASET,
            timeout_sec=SECONDS,
            send_conversation_id=True,
            headers={},
        )
        tasks, results, other = (queue.SimpleQueue[Any]() for _ in range(3))
        for task in (*conversations.items(), (script.TERM_SIGNAL, script.TERM_SIGNAL)):
            tasks.put(task)
        stop = threading.Event()
        asyncio.run(
            script.client_main(arguments, requests, 0, self._tokenizer, stop, tasks, results, other)
        )
        return [results.get()._asdict() for _ in range(results.qsize())]


def _load(folder: Path) -> Any:
    """Import the script. Its tables need pandas, and nothing else of it: a module stands for it."""
    sys.path.insert(0, str(folder))
    importlib.import_module("vllm.benchmarks.lib.utils")
    absent = importlib.util.find_spec("pandas") is None
    if absent:
        sys.modules["pandas"] = types.ModuleType("pandas")
    script = importlib.import_module("benchmark_serving_multi_turn")
    if absent:
        del sys.modules["pandas"]
    return script
