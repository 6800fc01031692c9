"""The binding to libucp: accepted libraries, structures, and statuses."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvferry.core.errors import DriverError, PeerLostError
from kvferry.drivers.ucx import library, transport, ucp
from kvferry.drivers.ucx import ucp_structs as structs
from kvferry.drivers.ucx.ucp import WorkerHandle, status_of
from tests.drivers.ucx import fake_libraries
from tests.drivers.ucx.test_library import LOAD_SCRIPT

PEERS_GONE = (-3, -6, -20, -23, -24, -25, -80)


@pytest.mark.parametrize(
    ("answer", "status"),
    [(0, 0), (4096, 1), ((1 << 64) - 25, -25), ((1 << 64) - 100, -100), ((1 << 64) - 101, 1)],
)
def test_status_of_done_error_and_request(answer: int, status: int) -> None:
    assert status_of(answer) == status


def test_statuses_of_a_lost_peer_become_peer_lost_error() -> None:
    for code in range(-100, 0):
        lost = isinstance(ucp.error(code, "trouble"), PeerLostError)
        assert lost == (code in PEERS_GONE), code
    assert "connection reset, -25" in str(ucp.error(-25, "trouble"))
    assert "status -99" in str(ucp.error(-99, "trouble"))


def test_a_worker_that_is_not_as_expected_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loaded, _ = transport._loaded(None)
    context = loaded.create_context("test", {}, {})
    destroyed: list[WorkerHandle] = []
    destroy = loaded.destroy_worker

    def noted(worker: WorkerHandle) -> None:
        destroyed.append(worker)
        destroy(worker)

    monkeypatch.setattr(loaded, "destroy_worker", noted)
    monkeypatch.setattr(ucp, "MAX_WORKER_ADDRESS", 0)
    callback = structs.ON_MESSAGE(lambda *_: 0)
    with pytest.raises(DriverError, match="its structures are others"):
        loaded.create_worker(context, callback)
    assert len(destroyed) == 1
    monkeypatch.undo()
    worker, *_ = loaded.create_worker(context, callback)
    loaded.destroy_worker(worker)
    loaded.destroy_context(context)


def test_installed_library_loads() -> None:
    found = library.find()
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD_SCRIPT, found.path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "True False\n"
    assert found.version >= library.LOWEST
    assert library.find(found.path).version == found.version


STRUCTURES = {
    kind: str(kind.__doc__).split("``")[1]
    for kind in vars(structs).values()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and hasattr(kind, "_fields_")
}
THEIR_NAMES = {
    ("ucp_request_param_t", "field_mask"): "op_attr_mask",
    ("ucp_ep_params_t", "err_handler_cb"): "err_handler.cb",
    ("ucp_ep_params_t", "err_handler_arg"): "err_handler.arg",
    ("ucp_ep_attr_t", "entries"): "transports.entries",
    ("ucp_ep_attr_t", "num_entries"): "transports.num_entries",
    ("ucp_ep_attr_t", "entry_size"): "transports.entry_size",
}
CONSTANTS = {
    "UCP_FEATURE_RMA": structs.Feature.RMA,
    "UCP_FEATURE_WAKEUP": structs.Feature.WAKEUP,
    "UCP_FEATURE_AM": structs.Feature.AM,
    "UCP_ERR_HANDLING_MODE_PEER": structs.ERRORS_OF_PEER,
    "UCP_EP_CLOSE_FLAG_FORCE": structs.CLOSE_BY_FORCE,
    "UCP_AM_SEND_FLAG_EAGER": structs.SEND_EAGERLY,
    "UCP_AM_FLAG_WHOLE_MSG": structs.WHOLE_MESSAGES,
    "UCS_THREAD_MODE_SERIALIZED": structs.SERIALIZED,
    "UCS_THREAD_MODE_MULTI": structs.MULTI,
    "UCS_MEMORY_TYPE_HOST": structs.MEMORY["cpu"],
    "UCS_MEMORY_TYPE_CUDA": structs.MEMORY["cuda"],
    "UCP_OP_ATTR_FIELD_FLAGS": structs.RequestParams.mask("flags"),
    "UCP_OP_ATTR_FIELD_MEMH": structs.RequestParams.mask("memh"),
    "UCP_PARAM_FIELD_MT_WORKERS_SHARED": structs.ContextParams.mask("mt_workers_shared"),
    "UCP_WORKER_PARAM_FIELD_EVENTS": structs.WorkerParams.mask("events"),
    "UCP_WORKER_PARAM_FIELD_FLAGS": structs.WorkerParams.mask("flags"),
    "UCP_WORKER_ATTR_FIELD_ADDRESS": structs.WorkerAttributes.mask("address"),
    "UCP_EP_PARAM_FIELD_ERR_HANDLER": structs.EndpointParams.mask("err_handler_cb"),
    "UCP_EP_ATTR_FIELD_TRANSPORTS": structs.EndpointAttributes.mask("entries"),
    "UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE": structs.MapParams.mask("memory_type"),
    "UCP_AM_HANDLER_PARAM_FIELD_CB": structs.HandlerParams.mask("cb"),
    **{f"UCS_ERR_{code.name}": int(code) for code in structs.Code if code < 0},
}


@fake_libraries.NEEDS_COMPILER
def test_structures_and_constants_match_the_headers(tmp_path: Path) -> None:
    """Compare every offset and constant with those of a C program."""
    spec = find_spec("libucx")
    if spec is None or spec.origin is None:
        pytest.skip("the headers are in the wheel libucx, which is not installed")
    assert len(STRUCTURES) == 11
    expected = [f"{name} {number}" for name, number in CONSTANTS.items()]
    lines = [f'printf("{name} %ld\\n", (long){name});' for name in CONSTANTS]
    for structure, name in STRUCTURES.items():
        for field, *_ in structure._fields_:
            theirs = THEIR_NAMES.get((name, field), field)
            expected.append(f"{name}.{theirs} {getattr(structure, field).offset}")
            lines.append(f'printf("{name}.{theirs} %zu\\n", offsetof({name}, {theirs}));')
    code = "#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\nint main(void) {"
    said = _output(tmp_path, code + "\n".join(lines) + "}", Path(spec.origin).parent / "include")
    assert said == expected


def _output(folder: Path, code: str, headers: Path) -> list[str]:
    program = folder / "program"
    command = ["cc", f"-I{headers}", "-o", str(program), "-xc", "-"]
    subprocess.run(command, input=code, text=True, check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()
