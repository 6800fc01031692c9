"""kvferry's log lines, where vLLM's are."""

from __future__ import annotations

import logging


def show() -> None:
    """Let kvferry's loggers use vLLM's handlers, unless somebody has set up logging for them.

    vLLM configures its own loggers only, so that an INFO line of any other would get lost.
    """
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
