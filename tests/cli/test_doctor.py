"""``kvferry doctor`` as a user runs it, and its findings on other machines."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.doctor import DoctorError, channel, devices, kernel, run, software, worst
from kvferry.cli.doctor.finding import Finding, FindingLevel, bad, ok, warn
from kvferry.cli.doctor.probe import Driver, Gpu, Probed, Ucx
from kvferry.cli.keys import keys_of
from kvferry.core import side_channel_messages as wire
from kvferry.core.handshake import HandshakeServer
from kvferry.core.security import Access, generate
from tests.cli.command import install_drivers, run_kvferry
from tests.core.messages import encoded, payload

MISSING_LIBRARY_CODE = """
import a_library_that_is_missing
"""
CRASH_AT_EXIT_CODE = """
import ctypes

from kvferry.drivers.loopback import LoopbackTransport


class Driver(LoopbackTransport):
    '''Uses a library that prints, and crashes in its exit handlers.'''

    library = "libcrash 7"

    def __init__(self):
        super().__init__()
        print("INFO: here I am", flush=True)
        libc = ctypes.CDLL(None)
        libc.on_exit(libc.abort, None)
"""
DYING_CODE = """
import os
import sys

print("segmentation fault, say", file=sys.stderr, flush=True)
os._exit(3)
"""


def findings_of(ran: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(ran.stdout)["findings"]}


def write_files(root: Path, **files: str) -> Path:
    """Write files below a folder; two underscores in a name stand for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# The command.


def test_findings_of_this_machine(tmp_path: Path) -> None:
    ran = run_kvferry(
        install_drivers(tmp_path, MISSING_LIBRARY_CODE, needy="Driver"), "doctor", "--json"
    )
    found = findings_of(ran)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["verdict"] == "warn"
    for name in ("driver loopback", "reading processes", "side channel at 127.0.0.1"):
        assert found[name]["verdict"] == "ok"
    needy = found["driver needy"]
    assert needy["verdict"] == "warn"
    assert "a_library_that_is_missing" in needy["found"]
    assert needy["remedy"]
    assert all(f["remedy"] for f in found.values() if f["verdict"] != "ok")
    assert {"python", "kvferry", "vllm", "GPU", "RDMA", "locked memory"} <= set(found)


def test_driver_that_prints_and_crashes_at_exit_is_fine(tmp_path: Path) -> None:
    ran = run_kvferry(install_drivers(tmp_path, CRASH_AT_EXIT_CODE, odd="Driver"), "doctor")
    assert ran.returncode == 0
    words = " ".join(ran.stdout.split())
    assert "driver odd kvferry-fake 1.2 (libcrash 7): cpu memory" in words
    assert "0 bad" in words


def test_driver_that_crashes_at_exit_is_listed(tmp_path: Path) -> None:
    environment = install_drivers(tmp_path, CRASH_AT_EXIT_CODE, odd="Driver")
    listed = run_kvferry(environment, "drivers", "--json")
    assert listed.returncode == 0
    assert '"library": "libcrash 7"' in listed.stdout


def test_driver_that_kills_its_process_is_bad(tmp_path: Path) -> None:
    ran = run_kvferry(install_drivers(tmp_path, DYING_CODE, deadly="Driver"), "doctor", "--json")
    found = findings_of(ran)
    assert ran.returncode == 1
    assert "status 3: segmentation fault, say" in found["drivers"]["found"]
    assert found["reading processes"]["verdict"] == "ok"


def test_unreachable_engine_is_bad(tmp_path: Path) -> None:
    ran = run_kvferry(install_drivers(tmp_path, ""), "doctor", "--host", "127.0.0.1", "--port", "1")
    assert ran.returncode == 1
    assert "nobody listens there" in " ".join(ran.stdout.split())


@pytest.mark.parametrize("arguments", [{"host": "here"}, {"port": 1}, {"engine": "prefill"}])
def test_engine_needs_host_and_port(arguments: dict[str, Any]) -> None:
    with pytest.raises(DoctorError, match="--host HOST --port PORT"):
        run(**arguments)


# The checks.


def test_worst_finding_decides() -> None:
    fine, known, wrong = ok("a", "fine"), warn("b", "old", "renew"), bad("c", "broken", "mend")
    assert worst([]) is FindingLevel.OK
    assert worst([fine]) is FindingLevel.OK
    assert worst([known, fine]) is FindingLevel.WARN
    assert worst([known, wrong, fine]) is FindingLevel.BAD


def test_no_working_driver_is_bad() -> None:
    lame = Driver(name="lame", distribution="lame 1", library="", memory=[], reason="it is lame")
    found = list(software.drivers(Probed(drivers=[lame])))
    assert [f.verdict for f in found] == [FindingLevel.WARN, FindingLevel.BAD]


def probed_ucx(*transports: str, rdma: bool = False, advice: str = "", gpus: int = 0) -> Probed:
    found = Ucx(
        driver="ucx",
        path="/lib/libucp.so.0",
        version="1.23.0",
        rdma=rdma,
        transports={key: ["mlx5_0:1" if "mlx5" in key else "memory"] for key in transports},
        advice=advice,
    )
    seen = [
        Gpu(index=n, address=f"1b:0{n}.0", dmabuf=True, needs_flush=False, can_flush=True)
        for n in range(gpus)
    ]
    return Probed(ucx=[found], gpus=seen)


def test_ucx_without_network_is_a_warning() -> None:
    def verdict(*transports: str) -> FindingLevel:
        (finding,) = software.drivers(probed_ucx(*transports))
        return finding.verdict

    assert verdict("self", "posix", "tcp") is FindingLevel.OK
    assert verdict("rc_mlx5") is FindingLevel.OK
    assert verdict("self", "posix") is FindingLevel.WARN
    assert verdict() is FindingLevel.WARN


def test_ucx_without_rdma_is_a_warning_beside_a_nic() -> None:
    (none,) = software.drivers(probed_ucx("tcp"))
    (unused,) = software.drivers(probed_ucx("tcp"), nics=["mlx5_0"])
    (used,) = software.drivers(probed_ucx("tcp", "rc_mlx5", rdma=True), nics=["mlx5_0"])
    assert (none.verdict, unused.verdict, used.verdict) == (
        FindingLevel.OK,
        FindingLevel.WARN,
        FindingLevel.OK,
    )
    assert none.found == "1.23.0, without RDMA (/lib/libucp.so.0): tcp"
    assert "which it cannot use" in unused.found
    assert "library" in unused.remedy


def test_nic_that_ucx_does_not_use_is_a_warning() -> None:
    probed = probed_ucx("tcp", "rc_mlx5", rdma=True)
    (finding,) = software.drivers(probed, nics=["mlx5_0", "mlx5_1"])
    assert finding.verdict is FindingLevel.WARN
    assert "it does not use the NIC mlx5_1" in finding.found
    assert "UCX_NET_DEVICES" in finding.remedy


def test_ucx_without_cuda_is_a_warning_beside_a_gpu() -> None:
    (none,) = software.drivers(probed_ucx("tcp"))
    (unused,) = software.drivers(probed_ucx("tcp", "cuda_copy", gpus=2))
    (used,) = software.drivers(probed_ucx("tcp", "cuda_copy", "cuda_ipc", gpus=2))
    assert (none.verdict, used.verdict) == (FindingLevel.OK, FindingLevel.OK)
    assert unused.verdict is FindingLevel.WARN
    assert "it lacks cuda_ipc for GPU memory" in unused.found
    assert "UCX_TLS" in unused.remedy


def test_better_ucx_is_a_warning() -> None:
    (finding,) = software.drivers(probed_ucx("tcp", advice="take the other one"))
    assert (finding.verdict, finding.remedy) == (FindingLevel.WARN, "take the other one")


@pytest.mark.parametrize(
    ("installed", "verdict"),
    [
        ("0.29.0", FindingLevel.OK),
        ("0.32.0+cpu", FindingLevel.OK),
        ("0.33.0", FindingLevel.WARN),
        ("0.3.2", FindingLevel.WARN),
    ],
)
def test_untested_vllm_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, installed: str, verdict: FindingLevel
) -> None:
    monkeypatch.setattr(software, "version", lambda name: installed)
    assert software.vllm().verdict is verdict


@pytest.mark.parametrize(
    ("scope", "verdict"), [("1\n", FindingLevel.OK), ("2\n", FindingLevel.WARN)]
)
def test_ptrace_scope(tmp_path: Path, scope: str, verdict: FindingLevel) -> None:
    root = write_files(tmp_path, sys__kernel__yama__ptrace_scope=scope)
    assert kernel.ptrace_scope(root).verdict is verdict


def test_missing_ptrace_scope_is_fine(tmp_path: Path) -> None:
    assert kernel.ptrace_scope(tmp_path).verdict is FindingLevel.OK


def test_forbidden_memory_access_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "the kernel forbids reading the memory of process 7: set kernel.x to 0"
    answer = subprocess.CompletedProcess(args=[], returncode=0, stdout=said, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: answer)
    finding = kernel.reading()
    assert finding.verdict is FindingLevel.BAD
    assert finding.found == "the kernel forbids reading the memory of process 7"
    assert finding.remedy == "set kernel.x to 0"


@pytest.mark.parametrize(
    ("rdma", "limit", "verdict"),
    [
        (True, resource.RLIM_INFINITY, FindingLevel.OK),
        (True, 1 << 23, FindingLevel.WARN),
        (False, 1 << 16, FindingLevel.OK),
    ],
)
def test_low_memlock_limit_is_a_warning_with_rdma(
    rdma: bool, limit: int, verdict: FindingLevel
) -> None:
    assert kernel.locked_memory(rdma=rdma, limit=limit).verdict is verdict


def test_small_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel, "SHARED_ENOUGH", 0)
    assert kernel.shared_memory(tmp_path).verdict is FindingLevel.OK
    monkeypatch.setattr(kernel, "SHARED_ENOUGH", 1 << 62)
    assert kernel.shared_memory(tmp_path).verdict is FindingLevel.WARN
    assert kernel.shared_memory(tmp_path / "missing").verdict is FindingLevel.WARN


PORT_FOLDER = "sys__class__infiniband__mlx5_0__ports__1__"


def rdma_finding(root: Path, state: str, *, usable: bool = True) -> Finding:
    facts = {"state": state, "rate": "400 Gb/sec (4X NDR)\n", "link_layer": "InfiniBand\n"}
    write_files(root, **{PORT_FOLDER + name: text for name, text in facts.items()})
    if usable:
        write_files(root, dev__infiniband__uverbs0="")
    return devices.rdma(root)


def test_active_nic_is_fine(tmp_path: Path) -> None:
    finding = rdma_finding(tmp_path, "4: ACTIVE\n")
    assert finding.verdict is FindingLevel.OK
    assert finding.found == "mlx5_0:1 InfiniBand, 400 Gb/sec (4X NDR), 4: ACTIVE"
    assert devices.active_nics(tmp_path) == ["mlx5_0"]


def test_inactive_nic_is_a_warning(tmp_path: Path) -> None:
    assert rdma_finding(tmp_path, "1: DOWN\n").verdict is FindingLevel.WARN
    assert (devices.nics(tmp_path), devices.active_nics(tmp_path)) == (["mlx5_0"], [])


def test_nic_without_device_files_is_a_warning(tmp_path: Path) -> None:
    finding = rdma_finding(tmp_path, "4: ACTIVE\n", usable=False)
    assert finding.verdict is FindingLevel.WARN
    assert "--device=/dev/infiniband" in finding.remedy


def test_missing_nic_is_fine(tmp_path: Path) -> None:
    assert devices.rdma(tmp_path).verdict is FindingLevel.OK
    assert devices.nics(tmp_path) == []


def test_gpus_found_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (found,) = devices.gpus(tmp_path)
    assert found.startswith("NVIDIA H200, 143771 MiB, 570.1")


def test_gpus_found_by_their_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    root = write_files(
        tmp_path, proc__driver__nvidia__gpus__0__information="Model: \t NVIDIA A100\n"
    )
    assert devices.gpus(root) == ["NVIDIA A100"]


def test_gpu_without_driver_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    root = write_files(tmp_path, sys__class__drm__card0__device__vendor="0x10de\n")
    (found,) = devices.gpus(root)
    assert found.startswith("NVIDIA GPU")
    finding = devices.gpu([found], library="libno_such_thing.so.1")
    assert finding.verdict is FindingLevel.WARN
    assert "does not load" in finding.found


def test_missing_gpu_is_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.gpus(tmp_path) == []
    assert devices.gpu([]).verdict is FindingLevel.OK


def test_encrypted_side_channel_is_a_warning() -> None:
    listed = Access(own=generate(), peers=frozenset({bytes(32)}))
    with HandshakeServer(
        encoded(payload()), engine="prefill", incarnation=7, access=listed
    ) as server:
        finding = channel.running("127.0.0.1", server.port, "prefill")
    assert finding.verdict is FindingLevel.WARN
    assert "does not admit everybody: its side channel is encrypted" in finding.found
    assert "Host and port are right" in finding.found
    assert "without keys, the engine itself cannot be asked" in finding.found
    assert "--curve-secret-key" in finding.remedy
    assert "--curve-peer" in finding.remedy
    assert "--curve-secret-key" in finding.remedy


def test_encrypted_engine_answers_with_keys() -> None:
    own, engine = generate(), generate()
    listed = Access(own=engine, peers=frozenset({own.public}))
    keys = keys_of("env:OWN", engine.public.hex(), {"OWN": own.secret.hex()})
    with HandshakeServer(
        encoded(payload()), engine="prefill", incarnation=7, access=listed
    ) as server:
        finding = channel.running("127.0.0.1", server.port, "prefill", keys)
    assert (finding.verdict, "incarnation 7" in finding.found) == (FindingLevel.OK, True)


def test_running_engine_is_identified() -> None:
    ranks = [wire.encode(payload())]
    with HandshakeServer(ranks, engine="prefill", incarnation=7) as server:
        right = channel.running("127.0.0.1", server.port, "prefill")
        anybody = channel.running("127.0.0.1", server.port, None)
        another = channel.running("127.0.0.1", server.port, "other")
    nobody = channel.running("127.0.0.1", server.port, None)
    assert (right.verdict, "incarnation 7" in right.found) == (FindingLevel.OK, True)
    assert (anybody.verdict, "this is engine 'prefill'" in anybody.found) == (FindingLevel.OK, True)
    assert (another.verdict, "this is engine 'prefill'" in another.found) == (
        FindingLevel.BAD,
        True,
    )
    assert (nobody.verdict, "nobody listens there" in nobody.found) == (FindingLevel.BAD, True)


def test_silent_server_is_no_side_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        finding = channel.running("127.0.0.1", stranger.getsockname()[1], None)
    assert finding.verdict is FindingLevel.BAD


def test_host_without_network_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "own_address", lambda: None)
    assert [f.verdict for f in channel.channels()] == [FindingLevel.OK, FindingLevel.WARN]


def test_default_host_is_said_to_be_for_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "own_address", lambda: "127.0.0.2")
    loopback, own = channel.channels()
    assert "the default of side_channel_host: only engines on this host reach it" in loopback.found
    assert own.name == "side channel at 127.0.0.2"
    assert "for engines on several hosts, set side_channel_host to it" in own.found


def test_foreign_own_address_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "own_address", lambda: "203.0.113.7")
    found = list(channel.channels())
    assert [f.verdict for f in found] == [FindingLevel.OK, FindingLevel.BAD]
    assert "side_channel_host" in found[1].remedy
