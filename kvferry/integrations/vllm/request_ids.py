"""What the ids of requests say that vLLM tells a connector in no other way.

vLLM's server names a completion request ``cmpl-ID``, and each of its prompts ``cmpl-ID-INDEX``. Its
engine appends a random suffix, and makes each of several samples (``n`` > 1) a request of its own,
with the sample's index in front.
"""

from __future__ import annotations

import re

SAMPLE = re.compile(r"^[0-9]+_")
"""The prefix of the ids of several samples of one prompt."""

# Four digits at most, so neither a suffix nor the end of a UUID. Clients choose ID, not the rest.
_LATER_PROMPT = re.compile(r"(?:[0-9]+_)?cmpl-.*-([1-9][0-9]{0,3})(?:-[0-9a-f]{8})?")


def is_sample(request_id: str) -> bool:
    """Return whether a request is one of several samples of a prompt."""
    return SAMPLE.match(request_id) is not None


def without_sample(request_id: str) -> str:
    """Return the id that all samples of a prompt share."""
    return SAMPLE.sub("", request_id)


def prompt_index(request_id: str) -> int:
    """Return which prompt of a completion request with a list of prompts a request is; else 0.

    vLLM's server answers with the first prompt's ``kv_transfer_params`` only, whichever it got.
    """
    found = _LATER_PROMPT.fullmatch(request_id)
    return int(found[1]) if found else 0
