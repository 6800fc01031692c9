"""Chat completions by way of vLLM's Responses API, the only one of vLLM 0.32 that streams tickets.

A stream of ``/v1/responses`` has the text as it is generated, and ``kv_transfer_params`` in the
last event. A proxy that asks decode there, and translates, gives its clients what vLLM 0.33 streams
for ``/v1/chat/completions``.

`adapted` copies this file beside the proxy, which imports it: it needs nothing of this project.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

PATH = "/responses"
SAME = ("model", "temperature", "ignore_eos", "kv_transfer_params")
"""The keys of a chat completion's body that the body for the Responses API has, too."""


def from_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for a streamed response from that of a chat completion."""
    asked = {key: body[key] for key in SAME if key in body}
    asked |= {"input": body["messages"], "stream": True, "store": False}
    if "max_tokens" in body:
        asked["max_output_tokens"] = body["max_tokens"]
    return asked


async def to_chat(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the lines of a streamed chat completion from those of a streamed response.

    Every chunk is followed by an empty line. A stream that breaks has no ``[DONE]``.
    """
    head: dict[str, Any] = {}
    async for line in lines:
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        if event["type"] == "response.created":
            head = _head(event["response"])
        for chunk in _chunks(event):
            yield f"data: {json.dumps(head | chunk)}"
            yield ""
        if event["type"] == "response.completed":
            yield "data: [DONE]"
            yield ""


def _head(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all chunks of an answer have in common."""
    return {
        "id": response["id"],
        "object": "chat.completion.chunk",
        "created": int(response["created_at"]),
        "model": response["model"],
    }


def _chunks(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chunk of an event; none for events that only announce a part of the answer."""
    match event["type"]:
        case "response.output_text.delta":
            return [{"choices": [_choice(event["delta"], None)]}]
        case "response.completed":
            response = event["response"]
            reason = "length" if response["status"] == "incomplete" else "stop"
            ticket = response.get("kv_transfer_params")
            return [{"choices": [_choice("", reason)], "kv_transfer_params": ticket}]
        case "error" | "response.failed":
            return [{"choices": [], "error": event}]
        case _:
            return []


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}, "finish_reason": reason}
