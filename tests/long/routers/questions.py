"""Requests of HTTP clients, chat and completions, streamed and whole, and what comes back."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from examples.tiny_llama import WORDS, prompt

ANSWER_FOLLOWS = 0  # the token that stands before every answer in a chat

TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'assistant' %}}{WORDS[ANSWER_FOLLOWS]} {{% endif %}}"
    "{{ message['content'] }} {% endfor %}"
    f"{WORDS[ANSWER_FOLLOWS]}"
)
"""A chat template for the tiny Llama, which has none.

The prompt of a turn begins with the prompt and the answer of the turn before.
"""

MAX_TOKENS = 24
AT_ONCE = 8
ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A client's request."""

    tokens: Sequence[int]  # The prompt
    # Whether it is sent as a chat message, and not as the prompt of a completion
    chat: bool = False
    stream: bool = False  # Whether the answer is to be streamed
    more: dict[str, Any] = field(default_factory=dict)  # Further keys of the request's body
    id: str = ""  # The value of the header ``X-Request-Id``, if it is not empty

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def prompt(self) -> list[int]:
        """The tokens that the engine sees."""
        return [*self.tokens, ANSWER_FOLLOWS] if self.chat else [*self.tokens]

    def body(self, model: str) -> dict[str, Any]:
        text = " ".join(WORDS[token] for token in self.tokens)
        asked = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        return asked | {
            "model": model,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.stream,
            **self.more,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client got."""

    status: int  # The HTTP status; 0 if the connection broke
    text: str = ""  # The text of the answer, whole or as far as it was streamed
    finish_reason: str | None = None  # As in the answer; none if it has none
    error: Any = None  # The value of ``error`` in the answer or in a chunk; none if there is none
    params: Any = None  # ``kv_transfer_params`` in the answer
    done: bool = False  # Whether the answer came to its end
    chunks: int = 0  # In how many chunks the answer was streamed
    raw: str = ""  # The body

    @property
    def complete(self) -> bool:
        """Whether a client takes this for a good answer.

        vLLM's multi-turn proxy leaves out an error in a stream: ``finish_reason`` shows it.
        """
        ended = self.done and self.finish_reason is not None
        return self.status == 200 and ended and self.error is None


def mixture(count: int, *, seed: int = 0, shortest: int = 5, longest: int = 500) -> list[Question]:
    """Return requests with prompts of evenly spread lengths, as many of each form."""
    lengths = [shortest + (longest - shortest) * i // max(1, count - 1) for i in range(count)]
    return [
        Question(
            tokens=prompt(length, seed=seed * count + i), chat=i % 2 == 1, stream=i // 2 % 2 == 1
        )
        for i, length in enumerate(lengths)
    ]


def ask(address: str, question: Question, model: str) -> Answer:
    """Send a request and read the answer."""
    where = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(
        where.hostname or "", where.port, timeout=ANSWER_SECONDS
    )
    try:
        headers = {"Content-Type": "application/json"}
        headers |= {"X-Request-Id": question.id} if question.id else {}
        connection.request("POST", question.path, json.dumps(question.body(model)), headers)
        response = connection.getresponse()
        return _read_stream(response) if question.stream else _read_whole(response)
    except (OSError, http.client.HTTPException) as error:
        return Answer(status=0, raw=f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def ask_all(address: str, questions: Iterable[Question], model: str) -> list[Answer]:
    """Send requests, several at once, and return their answers in order."""
    with ThreadPoolExecutor(AT_ONCE) as clients:
        return list(clients.map(lambda question: ask(address, question, model), questions))


def _read_whole(response: http.client.HTTPResponse) -> Answer:
    raw = response.read().decode()
    return replace(_answer(response.status, _json(raw)), done=True, raw=raw)


def _read_stream(response: http.client.HTTPResponse) -> Answer:
    """Read chunks until the end, or a break of the connection."""
    lines = [line.decode() for line in response]
    raw = "".join(lines)
    if not any(map(_is_data, lines)):
        return replace(_answer(response.status, _json(raw)), done=bool(raw), raw=raw)
    chunks = list(_chunks(lines))
    answer = _answer(response.status, chunks)
    return replace(answer, done="[DONE]" in raw, chunks=len(chunks), raw=raw)


def _is_data(line: str) -> bool:
    return line.startswith("data:")


def _chunks(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if _is_data(line) and (text := line.partition(":")[2].strip()) != "[DONE]":
            yield from _json(text)  # nothing, where the connection broke within the line


def _json(raw: str) -> list[dict[str, Any]]:
    try:
        body = json.loads(raw)
    except ValueError:
        return []
    return [body] if isinstance(body, dict) else []


def _answer(status: int, parts: Sequence[dict[str, Any]]) -> Answer:
    choices = [choice for part in parts for choice in part.get("choices", ())]
    errors = [part["error"] for part in parts if part.get("error")]
    params = [part["kv_transfer_params"] for part in parts if part.get("kv_transfer_params")]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return Answer(
        status=status,
        text="".join(map(_text, choices)),
        finish_reason=reasons[-1] if reasons else None,
        error=errors[-1] if errors else None,
        params=params[-1] if params else None,
    )


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("message") or choice.get("delta") or {}).get("content") or ""
