"""Which settings of UCX apply: the driver's, the environment's or the user's."""

from __future__ import annotations

import pytest

from kvferry.drivers.ucx.options import (
    REQUIRED_SETTINGS,
    UcxOptions,
    default_settings,
    user_settings,
)


def test_reads_by_cuda_ipc_are_on_unless_the_environment_has_the_setting() -> None:
    assert default_settings({})["CUDA_IPC_ENABLE_GET_ZCOPY"] == "y"
    assert "CUDA_IPC_ENABLE_GET_ZCOPY" not in default_settings(
        {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto"}
    )


@pytest.mark.parametrize("name", REQUIRED_SETTINGS)
def test_environment_does_not_override_settings_that_promises_rest_on(name: str) -> None:
    assert default_settings({f"UCX_{name}": "other"})[name] == REQUIRED_SETTINGS[name]


def test_user_settings_have_no_prefix() -> None:
    options = UcxOptions(settings={"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n", "TCP_CONN_NB": "n"})
    assert user_settings(options) == {"CUDA_IPC_ENABLE_GET_ZCOPY": "n", "TCP_CONN_NB": "n"}
