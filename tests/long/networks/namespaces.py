"""Two hosts on one machine: two network namespaces, joined by a pair of virtual devices (veth).

The calling thread enters one namespace, and so do the threads and processes that it starts.
``Networks.far`` runs a call in the other namespace. Each has a ``/sys`` of its own, where libraries
look up network devices.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")
Side = Literal["near", "far"]

DEVICE = "kvferry0"
"""The name of the device at both ends of the link."""
ADDRESSES: dict[Side, str] = {"near": "10.77.0.1", "far": "10.77.0.2"}

_CLONE_NEWNS, _CLONE_NEWNET = 0x0002_0000, 0x4000_0000
_MS_PRIVATE_EVERYWHERE = 0x4000 | 0x0004_0000
_CARRIER_SECONDS = 10.0
_HERE = Path("/proc/thread-self/ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """The link between the two namespaces."""

    _far: ThreadPoolExecutor

    def far(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a call in the other namespace."""
        return self._far.submit(call, *args, **kwargs).result()

    def cut(self, side: Side) -> None:
        """Take the device of one side down; the other side loses its carrier."""
        self._set(side, "down")

    def restore(self) -> None:
        """Bring both devices up and wait for their carrier. Addresses stay as they were."""
        for side in ADDRESSES:
            self._set(side, "up")
        _wait_for_carrier()
        self.far(_wait_for_carrier)

    def _set(self, side: Side, state: str) -> None:
        if side == "far":
            self.far(_ip, "link", "set", DEVICE, state)
        else:
            _ip("link", "set", DEVICE, state)


@contextmanager
def two_networks() -> Iterator[Networks]:
    """Move this thread into a network namespace that is linked to another one.

    Skip the test where that is not permitted.
    """
    if shutil.which("ip") is None:
        pytest.skip("networks are made with the program ip (iproute2), which is not installed")
    try:
        with _own_network(), ThreadPoolExecutor(1) as executor:
            executor.submit(_isolate).result()
            networks = Networks(_far=executor)
            there = str(networks.far(threading.get_native_id))
            _ip("link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", there)
            _address("near")
            networks.far(_address, "far")
            networks.restore()
            yield networks
    except PermissionError as exc:
        pytest.skip(f"a network of one's own is not permitted here ({exc}): run as root")


@contextmanager
def _own_network() -> Iterator[None]:
    folder = os.open(".", os.O_RDONLY)
    home = [os.open(_HERE / kind, os.O_RDONLY) for kind in ("mnt", "net")]
    try:
        _isolate()
        yield
    finally:
        for descriptor in home:
            _system("setns", descriptor, 0)
            os.close(descriptor)
        os.fchdir(folder)
        os.close(folder)


def _isolate() -> None:
    _system("unshare", _CLONE_NEWNS | _CLONE_NEWNET)
    _system("mount", b"none", b"/", None, _MS_PRIVATE_EVERYWHERE, None)
    _system("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def _address(side: Side) -> None:
    _ip("link", "set", "lo", "up")
    _ip("address", "add", f"{ADDRESSES[side]}/24", "dev", DEVICE)


def _wait_for_carrier() -> None:
    """Wait until the device has a carrier, which takes the kernel up to a second."""
    state = Path(f"/sys/class/net/{DEVICE}/operstate")
    deadline = time.monotonic() + _CARRIER_SECONDS
    while state.read_text(encoding="utf-8").strip() != "up":
        if time.monotonic() > deadline:
            raise TimeoutError(f"{DEVICE} has no carrier after {_CARRIER_SECONDS} s")
        time.sleep(0.005)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _system(name: str, *arguments: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
