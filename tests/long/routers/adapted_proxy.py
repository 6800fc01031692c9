"""The multi-turn proxy of vLLM's source, changed so that it gets tickets from vLLM 0.32's decode.

The proxy streams chat completions from decode, and remembers the ticket of the last chunk for the
conversation's next turn. vLLM sends tickets in streamed chat completions from 0.33 on, so between
servers of 0.32 the proxy as it is remembers none. The copy asks decode for a streamed response (as
in the Responses API) and translates: see `responses`. Nothing else is changed. In particular the
copy overwrites ``remote_host`` in both tickets, as the original does.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.long.routers import responses

CHANGES = {
    "import httpx\n": "import httpx\nimport responses\n",
    '    payload = req_data.copy()\n    payload["stream"] = True\n': (
        "    payload, endpoint = responses.from_chat(req_data), responses.PATH\n"
    ),
    "async for line in resp.aiter_lines():\n": (
        "async for line in responses.to_chat(resp.aiter_lines()):\n"
    ),
}
"""Texts of the proxy, each with what stands in its place."""

OCCURRENCES = (1, 2, 2)  # how often each text stands in the proxy: it asks decode in two places


def adapted(script: Path, folder: Path) -> Path:
    """Write the changed copy of ``disagg_proxy_multiturn.py`` to a folder; return its path."""
    text = script.read_text(encoding="utf-8")
    for (old, new), occurrences in zip(CHANGES.items(), OCCURRENCES, strict=True):
        assert text.count(old) == occurrences, f"{script} has changed: {old!r}"
        text = text.replace(old, new)
    copy = folder / script.name
    copy.write_text(text, encoding="utf-8")
    shutil.copy(responses.__file__, folder / "responses.py")
    return copy
