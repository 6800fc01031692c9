"""What an engine is refused for at start, each by name and with the remedy. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm.config import ConfigError
from kvferry.integrations.vllm.support import (
    check_engine,
    check_groups,
    check_siblings,
)
from tests.integrations.vllm.halves import engine


def media(**settings: object) -> Any:
    """vLLM's ``MultiModalConfig``, as far as it is looked at."""
    return SimpleNamespace(**{"mm_processor_cache_gb": 4, "video_pruning_rate": None} | settings)


def test_a_multimodal_engine_passes() -> None:
    check_engine(engine(multimodal_config=media()))
    check_engine(engine(multimodal_config=media(video_pruning_rate=0.0)))
    uncached = media(mm_processor_cache_gb=0)
    check_engine(engine(multimodal_config=uncached, enable_prefix_caching=True))


def test_an_ordinary_engine_passes() -> None:
    for role in ("kv_both", "kv_producer", "kv_consumer"):
        check_engine(engine(role))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"enable_sleep_mode": True}, "enable_sleep_mode: .* start without it"),
        (
            {"is_encoder_decoder": True},
            "encoder-decoder model 'tiny': .* cross attention .* start without kv_transfer_config",
        ),
        (
            {"runner_type": "pooling"},
            "pooling model 'tiny': .* nothing to decode; start without kv_transfer_config",
        ),
        (
            {"hisparse_config": object()},
            r"hisparse_config \(HiSparse\): .* have to be registered; start without it",
        ),
        ({"enabled": True}, "enable_return_routed_experts: .* start without it"),
        ({"enable_permute_local_kv": True}, "enable_permute_local_kv: .* remove it"),
        (
            {"multimodal_config": media(mm_processor_cache_gb=0)},
            "mm_processor_cache_gb 0 .* remove mm_processor_cache_gb, or set enable_prefix_caching",
        ),
        (
            {"multimodal_config": media(video_pruning_rate=0.5)},
            r"video_pruning_rate 0\.5: .* start without it",
        ),
    ],
)
def test_what_cannot_work_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engine(engine(**change))


def test_everything_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"enable_sleep_mode.*; enable_permute_local_kv"):
        check_engine(engine(enable_sleep_mode=True, enable_permute_local_kv=True))


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_replicas_of_a_cache_cannot_load_it(role: str) -> None:
    ranks = {"prefill_context_parallel_size": 2}
    with pytest.raises(ConfigError, match=f"prefill_context_parallel_size 2 with kv_role '{role}'"):
        check_engine(engine(role, **ranks))
    check_engine(engine("kv_producer", **ranks))
    check_engine(engine(role, **ranks, decode_context_parallel_size=2))


def test_a_model_without_a_cache() -> None:
    config: Any = SimpleNamespace(transfer_groups=())
    with pytest.raises(ConfigError, match=r"without a cache .* start without kv_transfer_config"):
        check_groups(config)


def transfer(role: str, *children: str) -> Any:
    return SimpleNamespace(
        kv_role=role,
        is_kv_consumer=role != "kv_producer",
        kv_connector_extra_config={"connectors": [{"kv_connector": name} for name in children]},
    )


@pytest.mark.parametrize("other", ["OffloadingConnector", "LMCacheConnectorV1", "SomebodyElses"])
def test_siblings_that_hand_nothing_over(other: str) -> None:
    for children in (("KVFerryConnector", other), (other, "KVFerryConnector")):
        check_siblings(transfer("kv_consumer"), transfer("kv_both", *children))


@pytest.mark.parametrize("other", ["NixlConnector", "MooncakeConnector", "KVFerryConnector"])
def test_siblings_that_hand_over_too(other: str) -> None:
    engine = transfer("kv_both", other, "KVFerryConnector")
    with pytest.raises(ConfigError, match=f"{other} and KVFerryConnector under one MultiConnector"):
        check_siblings(transfer("kv_producer"), engine)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_a_loader_below_a_producer(role: str) -> None:
    with pytest.raises(ConfigError, match=f"'{role}' under .* 'kv_producer'.*\"kv_both\""):
        check_siblings(transfer(role), transfer("kv_producer", "KVFerryConnector"))
    check_siblings(transfer(role), transfer("kv_consumer", "KVFerryConnector"))
    check_siblings(transfer("kv_producer"), transfer("kv_producer", "KVFerryConnector"))


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_conversations_in_one_direction(role: str) -> None:
    own = transfer(role)
    own.kv_connector_extra_config["bidirectional_kv_xfer"] = True
    with pytest.raises(ConfigError, match=f"with kv_role '{role}'.*set kv_role \"kv_both\""):
        check_siblings(own, own)
    own.kv_role = "kv_both"
    check_siblings(own, own)
    with pytest.raises(ConfigError, match="bidirectional_kv_xfer with kv_role 'kv_consumer'"):
        check_siblings(own, transfer("kv_consumer", "KVFerryConnector"))
