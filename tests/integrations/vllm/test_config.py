"""What `kv_connector_extra_config` may say. Needs no vLLM."""

from __future__ import annotations

import pytest

from kvferry.integrations.vllm.config import KEYS, NIXL_KEYS, Config, ConfigError, parse, risks


def test_nothing_set() -> None:
    assert parse({}) == Config()


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("drivr", "driver"),
        ("lease_duration", "kv_lease_duration"),
        ("sidechannel_port", "side_channel_port"),
        ("verify", "verify_prompt"),
    ],
)
def test_unknown_key_is_answered_with_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=f"unknown key '{key}'.*did you mean '{nearest}'"
    ) as raised:
        parse({key: 1})
    assert all(ours in str(raised.value) for ours in KEYS)


@pytest.mark.parametrize("key", sorted(NIXL_KEYS))
def test_key_of_nixl_is_answered_with_why(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({key: 1})
    assert NIXL_KEYS[key] in str(raised.value)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("driver", ["", 1]),
        ("driver_options", [[]]),
        ("side_channel_host", [""]),
        ("side_channel_port", [-1, 65536, "5600", True]),
        ("kv_lease_duration", [0, "30"]),
        ("max_held_fraction", [0, 1.5, float("nan")]),
        ("drain_timeout", [-1]),
        ("handshake_timeout", [0]),
        ("load_timeout", [0]),
        ("liveness_interval", [-0.1]),
        ("liveness_misses", [0]),
        ("engine_ttl", [0]),
        ("enforce_handshake_compat", ["false"]),
        ("verify_prompt", ["no", 0]),
        ("ticket_secrets", ["env:A", ["env:A"] * 9, [""]]),
        ("curve_secret_key", [["env:A"]]),
        ("curve_peers", [[1]]),
        ("allowed_peers", ["10.0.0.0/8"]),
    ],
)
def test_bad_value_is_named(key: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"kv_connector_extra_config: .*\$\.{key}"):
            parse({key: value})


def test_fixed_port_counts_up_by_data_parallel_index() -> None:
    assert parse({"side_channel_port": 5600}, data_parallel_index=3).side_channel_port == 5603
    assert parse({}, data_parallel_index=3).side_channel_port == 0
    with pytest.raises(ConfigError, match="side_channel_port 65535 plus the data-parallel index 1"):
        parse({"side_channel_port": 65535}, data_parallel_index=1)


def test_environment_of_nixl_is_named_in_one_warning() -> None:
    environment = {
        "PATH": "/bin",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "h",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "1",
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480",
    }
    [risk] = risks(Config(), environment)
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST (set side_channel_host instead)" in risk
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT (set side_channel_port instead)" in risk
    assert "VLLM_NIXL_ABORT_REQUEST_TIMEOUT (set kv_lease_duration instead)" in risk


def test_unverified_prompts_are_warned_of() -> None:
    environment = {"VLLM_LOGGING_LEVEL": "INFO"}
    assert not [*risks(Config(), environment)]
    [risk] = risks(Config(verify_prompt=False), environment)
    assert "verify_prompt is false" in risk
