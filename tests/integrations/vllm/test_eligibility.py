"""Which requests get a ticket, for how many tokens, or why none. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm.eligibility import TRUNCATED, Eligibility, NoTicketError
from kvferry.integrations.vllm.scheduler_metrics import NoTicket
from tests.integrations.vllm.halves import STATE, TALKS, facts, image, request

PROMPT = {"do_remote_decode": True}
ANSWER = {"do_remote_prefill": True}
EXACT = {"groups": (STATE,)}
AT_THE_END = {"mm_features": [image(3), image(30, length=9)]}
SCORED = {"skip_reading_prefix_cache": True}


def status(name: str) -> dict[str, Any]:
    return {"status": SimpleNamespace(name=f"FINISHED_{name}")}


def rules(backoff: int = 0, **settings: Any) -> Eligibility:
    return Eligibility(facts(lookahead=backoff + 1, **(TALKS | settings)))


def ended(params: dict[str, Any] | None, **changes: Any) -> Any:
    """A request with a prompt of 40 tokens that was computed, and 9 more of an answer."""
    made = request(40, params)
    if params == ANSWER:
        made.num_tokens, made.num_computed_tokens = 49, 48
    vars(made).update(changes)
    return made


def found(request: Any, rules: Eligibility) -> int | str | NoTicket:
    """The number of tokens, the reason, or the text of one without a reason."""
    try:
        return rules.tokens(request)
    except NoTicketError as error:
        return error.reason or error.why


@pytest.mark.parametrize(
    ("params", "changes", "settings", "expected"),
    [
        (PROMPT, {}, {}, 40),
        (PROMPT, {"num_computed_tokens": 43}, {}, 40),
        (PROMPT, {"num_computed_tokens": 43}, EXACT, NoTicket.WENT_ON),
        (PROMPT, {"num_computed_tokens": 0}, {}, ""),
        (PROMPT, {"request_id": "cmpl-a-1-89b15765"}, {}, ""),
        (PROMPT, {}, {"role": "kv_consumer"}, ""),
        (PROMPT, SCORED, EXACT, NoTicket.SCORED),
        (PROMPT, SCORED, EXACT | {"backoff": 40}, 40),
        (PROMPT, SCORED, {"backoff": 2}, 40),
        (PROMPT, AT_THE_END, {"backoff": 2}, NoTicket.CUT_MEDIA),
        (PROMPT, AT_THE_END, {"backoff": 1}, 40),
        (PROMPT, AT_THE_END, {"backoff": 40}, 40),
        (PROMPT | {TRUNCATED: True}, AT_THE_END, {"backoff": 2}, 40),
        (None, {}, {}, ""),
        (PROMPT | ANSWER, {}, {}, 40),
        (ANSWER, {}, {"bidirectional_kv_xfer": False}, ""),
        (ANSWER, {}, {}, 48),
        (ANSWER, {"num_computed_tokens": 40}, {}, 40),  # one was generated, and not computed
        (ANSWER, {"num_computed_tokens": 49}, {}, 49),  # a step under way computes the last one
        (ANSWER, {"num_computed_tokens": 53}, {}, 49),  # drafts were computed, too
        (ANSWER, {}, {"backoff": 3}, 45),  # what a predictor made of unverified tokens
        (ANSWER, {}, {"backoff": 50}, ""),
        (ANSWER, {"num_computed_tokens": 49}, EXACT, 49),
        (ANSWER, {"num_computed_tokens": 50}, EXACT, "more was computed than its tokens"),
        (ANSWER, {"prompt_embeds": object()}, {}, "its prompt has embeddings"),
        # Only what came to its end gets one.
        (PROMPT, status("STOPPED"), {}, 40),
        *(
            (params, status(name), {}, "")
            for params in (PROMPT, ANSWER)
            for name in ("ABORTED", "ERROR", "IGNORED", "REPETITION")
        ),
    ],
)
def test_tokens_of_a_ticket(
    params: Any, changes: dict[str, Any], settings: dict[str, Any], expected: Any
) -> None:
    what = found(ended(params, **changes), rules(**settings))
    assert what == expected or (isinstance(what, str) and expected and expected in what)


@pytest.mark.parametrize(
    ("changes", "backoff", "truncates"),
    [
        ({}, 0, False),
        ({}, 1, True),
        ({}, 39, True),
        ({}, 40, False),
        (SCORED, 1, False),
        (AT_THE_END, 1, True),
        (AT_THE_END, 2, False),
        ({"kv_transfer_params": PROMPT | {TRUNCATED: True}}, 1, False),
    ],
)
def test_prompts_that_are_truncated(changes: dict[str, Any], backoff: int, truncates: bool) -> None:
    assert rules(backoff=backoff).truncates(ended(PROMPT, **changes)) is truncates
