"""What an engine is refused for at launch and at start, each by name and with the remedy."""

from __future__ import annotations

import multiprocessing
import re
import socket
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm import plugin
from kvferry.integrations.vllm.checks import (
    cache_problems,
    check_engine,
    check_launch,
    engines_here,
    sibling_problems,
)
from kvferry.integrations.vllm.config import ConfigError
from tests.integrations.vllm.halves import engine
from tests.own_host import OWN_HOST


def media(**settings: object) -> Any:
    """vLLM's ``MultiModalConfig``, as far as it is looked at."""
    return SimpleNamespace(**{"mm_processor_cache_gb": 4, "video_pruning_rate": None} | settings)


REPLICAS: dict[str, Any] = {"prefill_context_parallel_size": 2}


@pytest.mark.parametrize(
    "config",
    [
        *(engine(role) for role in ("kv_both", "kv_producer", "kv_consumer")),
        engine("kv_producer", **REPLICAS),
        engine(**REPLICAS, decode_context_parallel_size=2),
        engine(multimodal_config=media()),
        engine(multimodal_config=media(video_pruning_rate=0.0)),
        engine(multimodal_config=media(mm_processor_cache_gb=0), enable_prefix_caching=True),
    ],
)
def test_engines_that_pass(config: Any) -> None:
    check_engine(config, config.kv_transfer_config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"enable_sleep_mode": True}, "enable_sleep_mode: .* start without it"),
        (
            {"runner_type": "pooling"},
            "pooling model 'tiny': .* nothing to decode; start without kv_transfer_config",
        ),
        ({"hisparse_config": object()}, "hisparse_config: .* start without it"),
        ({"enabled": True}, "enable_return_routed_experts: .* start without it"),
        ({"mamba_cache_mode": "all"}, 'mamba_cache_mode "all": .* set "align"'),
        (
            {"multimodal_config": media(mm_processor_cache_gb=0)},
            "mm_processor_cache_gb 0 .* remove mm_processor_cache_gb, or set enable_prefix_caching",
        ),
        (
            {"multimodal_config": media(video_pruning_rate=0.5)},
            r"video_pruning_rate 0\.5: .* start without it",
        ),
        (REPLICAS, "prefill_context_parallel_size 2 with kv_role 'kv_both'"),
        (REPLICAS | {"role": "kv_consumer"}, "parallel_size 2 with kv_role 'kv_consumer'"),
    ],
)
def test_what_cannot_work_is_named(change: dict[str, Any], words: str) -> None:
    made = engine(**change)
    with pytest.raises(ConfigError, match=words):
        check_engine(made, made.kv_transfer_config)


def test_a_model_without_a_cache() -> None:
    config: Any = SimpleNamespace(transfer_groups=(), kv_cache_groups=())
    [problem] = cache_problems(ferry("kv_producer"), config)
    assert "a model without a cache to hand over" in problem


def ferry(role: str = "kv_both", **extra: object) -> Any:
    """This connector's configuration, as vLLM has it."""
    return engine(role, kv_connector_extra_config=extra).kv_transfer_config


def named(name: str | None, module: str | None = None, **extra: Any) -> Any:
    return engine(
        kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra
    ).kv_transfer_config


def multi(*children: dict[str, Any], role: str = "kv_both") -> Any:
    transfer = ferry(role, connectors=list(children))
    transfer.kv_connector = "MultiConnector"
    return transfer


def child(name: str = "KVFerryConnector", **extra: Any) -> dict[str, Any]:
    return dict(vars(named(name, **extra)))


def launched(transfer: object, **changes: Any) -> Any:
    return engine(kv_transfer_config=transfer, **changes)


TALKS: dict[str, Any] = {"bidirectional_kv_xfer": True}


ROLES = ("kv_producer", "kv_consumer")


@pytest.mark.parametrize(
    ("own", "outer", "words"),
    [
        *((ferry(), multi(child(), child(o)), "") for o in ("OffloadingConnector", "Another's")),
        (ferry("kv_consumer"), multi(child("LMCacheConnectorV1"), child()), ""),
        (ferry(), multi(child(), role="kv_consumer"), ""),
        (ferry("kv_producer"), multi(child(), role="kv_producer"), ""),
        (ferry(**TALKS), ferry(**TALKS), ""),
        *(
            (ferry(), multi(child(name), child()), f"{name} and KVFerryConnector under one Multi")
            for name in ("NixlConnector", "MooncakeConnector", "KVFerryConnector")
        ),
        *(
            (ferry(role), multi(child(), role="kv_producer"), f"'{role}' under .* \"kv_both\"")
            for role in ("kv_consumer", "kv_both")
        ),
        *((ferry(r, **TALKS), ferry(r, **TALKS), f"'{r}'.*set kv_role \"kv_both\"") for r in ROLES),
        (ferry(**TALKS), multi(child(), role="kv_consumer"), "xfer with kv_role 'kv_consumer'"),
    ],
)
def test_siblings(own: Any, outer: Any, words: str) -> None:
    problems = "; ".join(sibling_problems(own, outer))
    assert re.search(words, problems)
    assert bool(words) == bool(problems)


# At launch.


def parallel(**changes: Any) -> Any:
    return engine(**changes).parallel_config


ELSEWHERE: tuple[dict[str, Any], ...] = (
    {"data_parallel_size_local": 0},
    {"data_parallel_backend": "ray"},
    {"distributed_executor_backend": "ray"},
)
"""No engine of these runs on this host."""


WRONG: dict[str, Any] = {"drvier": 1, "driver": "unheard-of", "curve_secret_key": "file:/missing"}
ALL_WRONG = "did you mean 'driver'.*no driver 'unheard-of'.*file:/missing cannot"


@pytest.mark.parametrize(
    ("transfer", "changes", "words"),
    [
        (None, {}, ""),
        (named(None), {}, ""),
        (named("NixlConnector", **WRONG), {}, ""),
        (named("KVFerryConnector", "another.module", **WRONG), {}, ""),
        (multi(child("NixlConnector", **WRONG)), {}, ""),
        (ferry(), {}, ""),
        (ferry(driver="nixl", driver_options={"backend": "UCX"}), {}, ""),
        *((transfer, {}, ALL_WRONG) for transfer in (ferry(**WRONG), multi(child(**WRONG)))),
        (ferry(), {"enable_sleep_mode": True}, "enable_sleep_mode"),
        (multi(child()), {"enable_sleep_mode": True}, "enable_sleep_mode"),
        (multi(child(), role="kv_producer"), {}, 'set the outer to "kv_both"'),
        (ferry(side_channel_host="192.0.2.1"), {}, "side_channel_host to an address of this host"),
        # Where no engine runs, no driver, no keys and no port are needed.
        *((ferry(driver="unheard-of", curve_secret_key="file:/missing"), e, "") for e in ELSEWHERE),
        *((ferry(drvier=1), elsewhere, "did you mean 'driver'") for elsewhere in ELSEWHERE),
    ],
)
def test_launch(transfer: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_launch(launched(transfer, **changes))


@pytest.mark.parametrize(
    ("changes", "indices"),
    [
        ({}, [0]),
        ({"data_parallel_size_local": 4}, [0, 1, 2, 3]),
        ({"data_parallel_index": 4, "data_parallel_size_local": 2}, [4, 5]),
        *((elsewhere, []) for elsewhere in (*ELSEWHERE, {"node_rank_within_dp": 1})),
    ],
)
def test_engines_of_this_host(changes: dict[str, object], indices: list[int]) -> None:
    assert list(engines_here(parallel(**changes))) == indices


def test_port_of_each_engine_of_this_host_is_tried() -> None:
    with socket.create_server((OWN_HOST, 0)) as taken:
        port = taken.getsockname()[1]
        for first, count in ((port, 1), (port - 2, 3)):
            with pytest.raises(ConfigError, match=f"{OWN_HOST} port {port}: the port is in use"):
                check_launch(
                    launched(
                        ferry(side_channel_host=OWN_HOST, side_channel_port=first, drain_timeout=0),
                        data_parallel_size_local=count,
                    )
                )
    check_launch(launched(ferry(side_channel_host=OWN_HOST, side_channel_port=port)))


def _in_a_child(answer: Any) -> None:
    answer.send(list(engines_here(parallel())))


def test_processes_that_vllm_started_do_not_try_the_port() -> None:
    """An API server may start, or start again, when its engine already listens."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_in_a_child, args=(theirs,))
    process.start()
    assert ours.recv() == []
    process.join()


# The plugin.


class EngineArgs:
    """vLLM's class, as far as the plugin looks at it."""

    def __init__(self, transfer: object, **changes: object) -> None:
        self.kv_transfer_config = transfer
        self.changes = changes
        self.asked: list[object] = []

    def create_engine_config(self, usage_context: object = None) -> Any:
        """Make the configuration."""
        self.asked.append(usage_context)
        return launched(self.kv_transfer_config, **self.changes)


@pytest.fixture
def engine_args(monkeypatch: pytest.MonkeyPatch) -> type[EngineArgs]:
    """The class after the plugin was registered twice, in a process with a stand-in of vLLM."""

    class Patched(EngineArgs):
        create_engine_config = EngineArgs.create_engine_config

    factory = SimpleNamespace(register_connector=lambda *_: None)
    name = "vllm.distributed.kv_transfer.kv_connector.factory"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(KVConnectorFactory=factory))
    arguments = SimpleNamespace(EngineArgs=Patched)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", arguments)
    plugin.register()
    once = Patched.create_engine_config
    plugin.register()
    assert Patched.create_engine_config is once
    return Patched


def test_plugin_checks_what_vllm_made_of_it(engine_args: type[EngineArgs]) -> None:
    arguments = engine_args(ferry(), enable_sleep_mode=True)
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        arguments.create_engine_config(usage_context="api")
    assert arguments.asked == ["api"]
