"""``kvferry doctor`` as a user runs it, and its findings about software and side channels."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvferry.cli import doctor
from kvferry.cli.doctor import DoctorError, channel, hardware, run, software, worst
from kvferry.cli.doctor.finding import Check, FindingLevel
from kvferry.cli.doctor.probe import Probed, probe
from kvferry.cli.doctor.software import LoadedUcx
from kvferry.cli.side_channel import keys_of
from kvferry.core.security import OPEN, Access, generate
from kvferry.core.side_channel.server import HandshakeServer
from tests.cli.command import Command, install_drivers, run_kvferry
from tests.cli.findings import BAD, OK, WARN, check
from tests.core.messages import encoded, payload

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
from importlib.metadata import PackageNotFoundError

print("segmentation fault, say", file=sys.stderr, flush=True)
os._exit(3)
"""
NIC = "mlx5_0"
OWN, ENGINE = generate(), generate()


def findings_of(ran: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(ran.stdout)["findings"]}


# The command.


def test_findings_of_this_machine(tmp_path: Path) -> None:
    """A driver that does not work is no failure, nor one that prints, and crashes at exit."""
    environment = install_drivers(tmp_path, DRIVERS_CODE, odd="Odd", needy="Needy")
    ran = run_kvferry(environment, "doctor", "--json")
    found = findings_of(ran)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["verdict"] == "warn"
    for name in ("driver loopback", "driver odd", "reading processes", "side channel at 127.0.0.1"):
        assert found[name]["verdict"] == "ok"
    assert found["driver odd"]["found"] == "kvferry-fake 1.2 (libcrash 7): cpu memory"
    needy = found["driver needy"]
    assert needy["verdict"] == "warn"
    assert "a_library_that_is_missing" in needy["found"]
    assert all(f["remedy"] for f in found.values() if f["verdict"] != "ok")
    assert {"python", "kvferry", "vllm", "GPU", "RDMA", "locked memory"} <= set(found)


def test_driver_that_kills_its_process_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = install_drivers(tmp_path, DYING_CODE, deadly="Driver")
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    found = probe()
    assert found.drivers == []
    (finding,) = software.no_driver(found.drivers, found.trouble)
    check(finding, BAD, "status 3: segmentation fault, say")
    check(hardware.reading(found.reading), OK, "a process read this one")


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (sys.modules[probe.__module__], "SECONDS", 0.0, "the drivers have not started within 0 s"),
        (sys, "executable", "/nowhere/python", "the drivers could not be asked: "),
    ],
)
def test_drivers_that_say_nothing_are_bad(
    owner: object, name: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, value)
    found = probe()
    (finding,) = software.no_driver(found.drivers, found.trouble)
    check(finding, BAD, said)
    check(hardware.reading(found.reading), WARN, "not known")


def test_unreachable_engine_is_bad_in_the_table(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    lame = Check("driver lame").ok("lame 1: cpu memory")
    monkeypatch.setattr(doctor, "probe", lambda: Probed(drivers=[lame]))
    ran = command.run("doctor", "127.0.0.1:1")
    assert (ran.status, ran.err) == (1, "")
    for part in ("✓ driver lame: lame 1: cpu memory", "nobody listens there", "→ ", " 1 bad, "):
        assert part in f" {ran.words}"


def test_options_of_an_engine_need_its_address() -> None:
    with pytest.raises(DoctorError, match="give HOST:PORT"):
        run(engine="prefill")


def test_worst_finding_decides() -> None:
    a = Check("a")
    fine, known, wrong = a.ok("fine"), a.warn("old", "renew"), a.bad("broken", "mend")
    assert [worst(all_) for all_ in ([], [known, fine], [known, wrong, fine])] == [OK, WARN, BAD]
    (finding,) = software.no_driver([known], "")
    check(finding, BAD, "none of them works here")
    assert list(software.no_driver([known, fine], "")) == []


# Software.


@pytest.mark.parametrize(
    ("transports", "nics", "cuda", "found", "remedy"),
    [
        (["self", "posix"], [], False, "none of them leads to another host", "UCX_TLS"),
        ([], [], False, "no transport", "UCX_TLS"),
        (["tcp"], [NIC], False, "which it cannot use", "library"),
        (["tcp", "rc_mlx5"], [NIC, "mlx5_1"], False, "not use the NIC mlx5_1", "NET_DEVICES"),
        (["tcp", "cuda_copy"], [], True, "it lacks cuda_ipc for GPU memory", "UCX_TLS"),
        # Nothing is lacking.
        (["tcp"], [], False, "1.23.0, without RDMA (/lib/libucp.so.0): tcp", ""),
        (["rc_mlx5"], [], False, "", ""),
        (["tcp", "rc_mlx5"], [NIC], False, "", ""),
        (["tcp", "cuda_copy", "cuda_ipc"], [], True, "", ""),
    ],
)
def test_what_ucx_lacks_is_a_warning(
    transports: list[str], nics: list[str], cuda: bool, found: str, remedy: str
) -> None:
    ucx = LoadedUcx(
        driver="ucx",
        path="/lib/libucp.so.0",
        version="1.23.0",
        rdma="rc_mlx5" in transports,
        transports={key: ["mlx5_0:1" if "mlx5" in key else "mlx5_1"] for key in transports},
    )
    finding = software.ucx(ucx, nics, cuda=cuda)
    check(finding, WARN if remedy else OK, found, remedy)


def test_untested_versions_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, verdict in (("0.29.0", OK), ("0.32.0+cpu", OK), ("0.33.0", WARN), ("0.3", WARN)):
        monkeypatch.setattr(software, "version", lambda _, found=installed: found)
        check(software.vllm(), verdict)
    missing = MagicMock(side_effect=PackageNotFoundError)
    monkeypatch.setattr(software, "version", missing)
    check(software.vllm(), OK, "not installed; the connector is for vLLM 0.29 to 0.32")
    check(software.python(), OK)
    monkeypatch.setattr(software, "PYTHONS", ((3, 8), (3, 9)))
    check(software.python(), WARN, "", "tested with Python 3.8 to 3.9 on Linux")


def test_forbidden_memory_access_is_bad() -> None:
    said = "the kernel forbids reading the memory of process 7: set kernel.x to 0"
    check(hardware.reading(said), BAD, "the memory of process 7", "set kernel.x to 0")


# Side channels.


@pytest.mark.parametrize(
    ("engine", "keyed", "given", "verdict", "found", "remedy"),
    [
        ("prefill", False, "", OK, "incarnation 7", ""),
        (None, False, "", OK, "this is engine 'prefill'", ""),
        ("other", False, "", BAD, "this is engine 'prefill'", "correct --engine"),
        ("prefill", True, "OWN", OK, "incarnation 7", ""),
        ("prefill", True, "", WARN, "does not admit everybody: its side", "--curve-secret-key"),
        ("prefill", True, "", WARN, "Host and port are right", "--curve-peer"),
        ("prefill", True, "STRANGER", WARN, "does not admit", "list this command's public key"),
    ],
)
def test_running_engine_is_identified(
    engine: str | None, keyed: bool, given: str, verdict: FindingLevel, found: str, remedy: str
) -> None:
    access = Access(own=ENGINE, peers=frozenset({OWN.public})) if keyed else OPEN
    environment = {"OWN": OWN.secret.hex(), "STRANGER": generate().secret.hex()}
    keys = keys_of(f"env:{given}", ENGINE.public.hex(), environment) if given else keys_of("", "")
    with HandshakeServer(
        encoded(payload()), engine="prefill", incarnation=7, access=access
    ) as server:
        finding = channel.running(server.host, server.port, engine, keys)
    check(finding, verdict, found, remedy)
    check(channel.running(server.host, server.port, engine), BAD, "nobody listens there", "start")


def test_silent_server_is_no_side_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        check(channel.running("127.0.0.1", stranger.getsockname()[1], None), BAD)


def test_addresses_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, verdict, found, remedy in (
        (None, WARN, "", ""),
        ("127.0.0.2", OK, "for engines on several hosts, set side_channel_host to it", ""),
        ("203.0.113.7", BAD, "", "side_channel_host"),
    ):
        monkeypatch.setattr(channel, "own_address", lambda address=address: address)
        loopback, own = channel.channels()
        check(loopback, OK, "the default of side_channel_host: only engines on this host reach it")
        check(own, verdict, found, remedy)
        assert address is None or own.name == f"side channel at {address}"
    monkeypatch.setattr(channel, "ping", lambda *_, **__: 7)
    finding, *_ = channel.channels()
    check(finding, BAD, "another process answered", "what redirects connections here")
