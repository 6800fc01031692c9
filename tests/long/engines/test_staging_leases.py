"""Leases end what a staged engine holds in host memory."""

from __future__ import annotations

import pytest

from examples.tiny_llama import prompt
from tests.engines import probes
from tests.engines.engines import Engine
from tests.engines.fixtures import StartEngine
from tests.engines.steps import eventually, hand_over, texts
from tests.engines.test_staging import STAGED, given_back, staging_decode

__all__ = ["staging_decode"]

pytestmark = pytest.mark.timeout(300)


def test_decode_that_is_killed(
    reference: Engine, start_engine: StartEngine, staging_decode: Engine
) -> None:
    """The lease ends the holds that it had claimed, and prefill's host pages return."""
    prefill = start_engine("bereaved", "kv_producer", extra=STAGED | {"kv_lease_duration": 3.0})
    mortal = start_engine("mortal-decode", "kv_consumer", extra=STAGED, max_num_seqs=1)
    mortal.submit(prompt(10), max_tokens=1000)
    some = [prompt(length, seed=62) for length in (100, 300)]
    mortal.submit(*some, params=prefill.prefill(*some))
    eventually(lambda: prefill.run(probes.claimed) == len(some))
    mortal.kill()
    given_back(prefill)
    assert hand_over(prefill, staging_decode, *some)[0] == texts(reference, *some)
    given_back(prefill, staging_decode)
    prefill.close()
