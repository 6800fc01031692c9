"""How NIXL's native agent is made, on a stand-in for NIXL's bindings; the memory that it claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.errors import DriverError
from kvferry.drivers.cuda import CudaDriver
from kvferry.drivers.nixl import agent as module
from kvferry.drivers.nixl.agent import Agent
from kvferry.drivers.nixl.library import NixlLibrary
from kvferry.drivers.nixl.options import NixlOptions
from tests.gpu.driver_api import StandInCuda

CUDA = CudaDriver(StandInCuda())


class StandInAgent:
    """A native agent, with a backend for CPU memory that notifies nobody."""

    def __init__(self, name: str, config: object) -> None:
        self.name, self.config = name, config

    def getAvailPlugins(self) -> list[str]:
        return ["UCX"]

    def getPluginParams(self, name: str) -> tuple[dict[str, str], list[str]]:
        return {}, []

    def createBackend(self, name: str, params: dict[str, str]) -> int:
        return 1

    def getLocalMD(self) -> bytes:
        return b"metadata"

    def getBackendParams(self, backend: int) -> tuple[dict[str, str], list[str]]:
        assert backend == 1
        return {}, ["DRAM_SEG"]

    def getNotifs(self, known: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
        raise RuntimeError("this backend has no notifications")


def library(**changes: Any) -> NixlLibrary:
    bindings = SimpleNamespace(
        NIXL_READ=2,
        NIXL_SUCCESS=0,
        NIXL_IN_PROG=1,
        NIXL_THREAD_SYNC_STRICT="strict",
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=type("ChangedAgent", (StandInAgent,), changes),
    )
    return NixlLibrary(
        package="nixl_stand_in",
        version="0",
        api=SimpleNamespace(nixlBind=bindings),
        errors=(RuntimeError, KeyError),
        lost=OSError,
        unknown=KeyError,
    )


@contextmanager
def agent(**options: Any) -> Iterator[Agent]:
    made = Agent(library(), "ours", NixlOptions(**options))
    try:
        yield made
    finally:
        made.close(quiet=True)


def test_options_are_in_the_native_agent_s_configuration() -> None:
    with agent(progress_milliseconds=3, telemetry=True, progress_thread=False) as made:
        assert vars(made._native.config) == {
            "useProgThread": False,
            "pthrDelay": 3000,
            "captureTelemetry": True,
            "syncMode": "strict",
        }


def test_agent_has_what_its_backend_can_do() -> None:
    with agent() as made:
        assert (made.memory, made.notifies) == (frozenset({"cpu"}), False)


def fail(*_: object) -> None:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"createBackend": fail}, "backend UCX of nixl_stand_in 0 does not start with"),
        ({"getLocalMD": fail}, "backend UCX of nixl_stand_in 0 reaches no other process"),
    ],
)
def test_backend_that_cannot_be_used_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DriverError, match=said):
        Agent(library(**changes), "ours", NixlOptions())


@pytest.mark.parametrize(
    ("libraries", "cuda", "kinds"),
    [
        ([], None, set()),
        (["libcuda.so.1"], CUDA, {"cuda"}),
        (["libcuda.so.1"], None, set()),  # no GPU
        (["libhsa-runtime64.so.1"], None, {"cuda"}),
        (["libze_loader.so.1"], None, {"xpu"}),
        (["libhl-thunk.so"], None, {"hpu"}),
    ],
)
def test_kind_is_claimed_with_its_driver_library(
    monkeypatch: pytest.MonkeyPatch, libraries: list[str], cuda: CudaDriver | None, kinds: set[str]
) -> None:
    def load(name: str) -> str:
        if name not in libraries:
            raise OSError(f"{name}: cannot open shared object file")
        return name

    monkeypatch.setattr("ctypes.CDLL", load)
    monkeypatch.setattr(module, "find_cuda", lambda: cuda)
    assert module.accelerators() == kinds
