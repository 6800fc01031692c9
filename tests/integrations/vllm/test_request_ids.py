"""What is read from the ids that vLLM gives requests. Needs no vLLM.

``tests/vllm/test_hooks_in_vllm.py`` and ``routers`` compare the forms with vLLM's own.
"""

from __future__ import annotations

import pytest

from kvferry.integrations.vllm.request_ids import (
    is_sample,
    prompt_index,
    without_sample,
)

ROUTER = "___prefill_addr_127.0.0.1:8100___decode_addr_127.0.0.1:8200_" + "0123456789abcdef" * 2
UUID = "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"


@pytest.mark.parametrize(
    ("request_id", "index"),
    [
        (f"cmpl-{ROUTER}-0-89b15765", 0),
        (f"cmpl-{ROUTER}-1-89b15765", 1),
        (f"cmpl-{ROUTER}-12-12345678", 12),
        (f"1_cmpl-{ROUTER}-3-89b15765", 3),
        (f"cmpl-{UUID}-0-12345678", 0),
        (f"cmpl-{UUID}-2", 2),  # VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        ("cmpl-client-5-0-12345678", 0),  # the client chose "client-5"
        ("cmpl-client-5-0", 0),
        ("cmpl-550e8400-e29b-41d4-a716-446655440000", 0),
        ("cmpl-7-89b15765", 0),
        ("chatcmpl-client-5-89b15765", 0),
        ("generate-tokens-cmpl-client-5-89b15765", 0),  # each of these gets its own ticket
        ("client-5", 0),
        ("5", 0),
        ("", 0),
    ],
)
def test_index_of_a_prompt_in_a_list(request_id: str, index: int) -> None:
    assert prompt_index(request_id) == index


def test_samples_and_suffixes() -> None:
    assert is_sample("0_cmpl-a-0-89b15765")
    for other in ("cmpl-0_a-0-89b15765", "cmpl-7", "a0_b", "0-7", "_7", ""):
        assert not is_sample(other)
    assert without_sample("10_cmpl-0_a-0-89b15765") == "cmpl-0_a-0-89b15765"
    assert without_sample("cmpl-0_a-0-89b15765") == "cmpl-0_a-0-89b15765"
