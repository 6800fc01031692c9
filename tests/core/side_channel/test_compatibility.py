"""What the ranks of one engine, and two engines, must have in common."""

from __future__ import annotations

from dataclasses import replace

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


def test_a_value_that_is_only_told_is_no_difference_and_refusals_name_it() -> None:
    told = Judgements(told=frozenset({"vLLM", "equal"}))
    mine = payload(agreement={"model": "a", "vLLM": "0.32", "equal": "1"})
    theirs = payload(engine="decode", agreement={"model": "a", "vLLM": "0.29", "equal": "1"})
    assert agree(mine, theirs, told) == ()
    with pytest.raises(IncompatibleError, match=r"vLLM: '0\.32' here, '0\.29' there"):
        agree(mine, theirs)
    theirs.agreement["model"] = "b"
    with pytest.raises(IncompatibleError) as caught:
        agree(mine, theirs, told)
    assert "They differ in model: 'a' here, 'b' there. " in str(caught.value)
    assert str(caught.value).endswith(" (vLLM: '0.32' here, '0.29' there)")


def test_every_difference_is_named_with_both_values() -> None:
    mine = payload(2, agreement={"model": "a", "dtype": "bf16", "same": "x"})
    differing = {"model": "b", "dtype": "fp8", "same": "x"}
    theirs = payload(1, engine="decode", oldest=2, newest=3, driver="nixl", agreement=differing)
    with pytest.raises(IncompatibleError) as caught:
        agree(mine, theirs)
    text = str(caught.value)
    for message in (
        "engine 'prefill' (rank 2)",
        "engine 'decode' (rank 1)",
        "protocol versions: '1 to 1' here, '2 to 3' there",
        "and upgrade the older of the two engines",
        "driver: 'loopback' here, 'nixl' there",
        "model: 'a' here, 'b' there",
        "dtype: 'bf16' here, 'fp8' there",
    ):
        assert message in text
    assert "same" not in text


def test_agreement_keys_of_only_one_engine_are_ignored() -> None:
    for mine, theirs in (({"model": "a", "new": "x"}, {}), ({}, {"model": "a"})):
        assert agree(payload(agreement=mine), payload(agreement=theirs)) == ()


MODEL = Judgements(keys=frozenset({"model"}))
OVERRIDDEN = Judgements(keys=frozenset({"model"}), overridden=True)


def test_a_judgement_is_refused_with_the_setting_that_overrides_it() -> None:
    with pytest.raises(IncompatibleError, match="set enforce_handshake_compat to false"):
        agree(payload(agreement={"model": "a"}), payload(agreement={"model": "b"}), MODEL)


def test_an_overridden_judgement_is_returned_with_both_values() -> None:
    mine, theirs = (payload(agreement={"model": m, "dtype": "x"}) for m in "ab")
    assert agree(mine, theirs, OVERRIDDEN) == ("model: 'a' here, 'b' there",)
    assert agree(mine, mine, OVERRIDDEN) == ()


@pytest.mark.parametrize("judgements", [MODEL, OVERRIDDEN])
@pytest.mark.parametrize(
    "theirs",
    [
        payload(agreement={"model": "b", "dtype": "y"}),
        payload(agreement={"model": "b"}, driver="nixl"),
        payload(agreement={"model": "b"}, oldest=2, newest=2),
    ],
    ids=["agreement", "driver", "version"],
)
def test_a_fact_is_never_overridden(judgements: Judgements, theirs: wire.RankPayload) -> None:
    with pytest.raises(IncompatibleError) as caught:
        agree(payload(agreement={"model": "a", "dtype": "x"}), theirs, judgements)
    assert "enforce_handshake_compat" not in str(caught.value)
    assert ("model" in str(caught.value)) is not judgements.overridden


def test_long_values_of_a_peer_are_shortened() -> None:
    with pytest.raises(IncompatibleError) as caught:
        agree(payload(agreement={"model": "a"}), payload(agreement={"model": "b" * 4000}))
    assert len(str(caught.value)) < 600
