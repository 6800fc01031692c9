"""What the ranks of one engine, and two engines, must have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.core import messages as wire
from kvferry.core.errors import HandshakeError, IncompatibleError
from kvferry.core.side_channel.compatibility import Judgements, agree, engine_info
from tests.core.messages import encoded, payload


def with_groups(rank: int, count: int) -> wire.RankPayload:
    """Return a rank's payload with ``count`` groups."""
    one = payload(rank)
    layout = replace(one.layout, groups=one.layout.groups * count)
    return msgspec.structs.replace(one, layout=layout)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([payload(1), payload(0)], "payload 0 of 2 is that of rank 1"),
        ([payload(0), payload(0, tp=1)], "payload 1 of 2 is that of rank 0"),
        ([payload(0, tp=3), payload(1, tp=3)], "ranks 0 and 1 both stand at"),
        (
            [payload(0), payload(1, address=payload(0).address)],
            "ranks 0 and 1 publish one transport address; every rank",
        ),
        ([payload(0), payload(1, engine="decode")], "engine 'prefill', rank 1 'decode'"),
        ([payload(0), payload(1, incarnation=8)], "incarnation 7, rank 1 8"),
        ([payload(0), with_groups(1, 2)], "rank 0 has 1 groups, rank 1 2"),
        ([with_groups(0, 2), payload(1)], "rank 0 has 2 groups, rank 1 1"),
        ([payload(0), payload(1, driver="nixl")], "driver 'loopback', rank 1 'nixl'"),
        ([payload(0), payload(1, agreement={"model": "big"})], "model 'tiny', rank 1 'big'"),
        ([], "payloads of 0 ranks"),
    ],
)
def test_payloads_that_differ_within_one_engine_are_refused(
    ranks: list[wire.RankPayload], message: str
) -> None:
    with pytest.raises(HandshakeError, match=message):
        engine_info(encoded(*ranks))


# Two engines.

MODEL = Judgements(keys=frozenset({"model"}))
OVERRIDDEN = Judgements(keys=frozenset({"model"}), overridden=True)
TOLD = Judgements(told=frozenset({"vLLM", "equal"}))


def refusal(mine: wire.RankPayload, theirs: wire.RankPayload, judgements: Judgements) -> str:
    with pytest.raises(IncompatibleError) as caught:
        agree(mine, theirs, judgements)
    return str(caught.value)


def test_a_value_that_is_only_told_is_no_difference_and_refusals_name_it() -> None:
    mine = payload(agreement={"model": "a", "vLLM": "0.32", "equal": "1"})
    theirs = payload(engine="decode", agreement={"model": "a", "vLLM": "0.29", "equal": "1"})
    assert agree(mine, theirs, TOLD) == ()
    assert "vLLM: '0.32' here, '0.29' there" in refusal(mine, theirs, Judgements())
    theirs.agreement["model"] = "b"
    text = refusal(mine, theirs, TOLD)
    assert "They differ in model: 'a' here, 'b' there. " in text
    assert text.endswith(" (vLLM: '0.32' here, '0.29' there)")


def test_every_difference_is_named_with_both_values() -> None:
    mine = payload(2, agreement={"model": "a", "dtype": "bf16", "same": "x"})
    differing = {"model": "b" * 4000, "dtype": "fp8", "same": "x"}
    theirs = payload(1, engine="decode", oldest=2, newest=3, driver="nixl", agreement=differing)
    text = refusal(mine, theirs, Judgements())
    for message in (
        "engine 'prefill' (rank 2)",
        "engine 'decode' (rank 1)",
        "protocol versions: '1 to 1' here, '2 to 3' there",
        "and upgrade the older of the two engines",
        "driver: 'loopback' here, 'nixl' there",
        "model: 'a' here, 'bbb",
        "dtype: 'bf16' here, 'fp8' there",
    ):
        assert message in text
    assert "same" not in text
    assert len(text) < 800, "long values of a peer are shortened"


def test_agreement_keys_of_only_one_engine_are_ignored() -> None:
    for mine, theirs in (({"model": "a", "new": "x"}, {}), ({}, {"model": "a"})):
        assert agree(payload(agreement=mine), payload(agreement=theirs)) == ()


def test_a_judgement_is_refused_with_its_setting_or_overridden_and_returned() -> None:
    mine, theirs = (payload(agreement={"model": m, "dtype": "x"}) for m in "ab")
    assert "set enforce_handshake_compat to false" in refusal(mine, theirs, MODEL)
    assert agree(mine, theirs, OVERRIDDEN) == ("model: 'a' here, 'b' there",)
    assert agree(mine, mine, OVERRIDDEN) == ()


@pytest.mark.parametrize("judgements", [MODEL, OVERRIDDEN])
@pytest.mark.parametrize(
    "changes", [{"agreement": {"model": "b", "dtype": "y"}}, {"driver": "nixl"}, {"oldest": 2}]
)
def test_a_fact_is_never_overridden(judgements: Judgements, changes: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"agreement": {"model": "b"}, "newest": 2}
    theirs = payload(**(plain | changes))
    text = refusal(payload(agreement={"model": "a", "dtype": "x"}), theirs, judgements)
    assert "enforce_handshake_compat" not in text
    assert ("model" in text) is not judgements.overridden
