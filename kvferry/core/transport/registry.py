"""Drivers by name: found through the entry-point group ``kvferry.drivers``, loaded one by one.

``importlib.metadata`` lists them without importing any, so that a broken driver is listed as broken
instead of being left out. stevedore then loads the one that is asked for.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from stevedore import DriverManager

from kvferry.core.errors import DriverError
from kvferry.core.transport import (
    INTERFACE_VERSION,
    Capabilities,
    EnterThread,
    Transport,
    enter_nothing,
)
from kvferry.core.transport.threads import ENTER, takes_enter

GROUP = "kvferry.drivers"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DriverInfo:
    """An installed driver, which may not work on this machine."""

    name: str  # of the entry point, by which a configuration chooses the driver
    distribution: str  # the Python distribution that contains the driver
    version: str  # of the distribution
    entry_point: str  # module:class


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReport:
    """What a driver can do on this machine, or the ``reason`` why it does not work here."""

    info: DriverInfo
    capabilities: Capabilities | None = None
    library: str = ""
    reason: str | None = None


def installed() -> list[DriverInfo]:
    """Return all installed drivers, sorted by name, without importing any of them."""
    return sorted(_info(entry) for entry in _entries())


def find(name: str) -> DriverInfo:
    """Return the installed driver with this name, not imported; else ``DriverError``."""
    return _info(_entry(name))


def create(
    name: str,
    options: Mapping[str, object] | None = None,
    *,
    enter: EnterThread = enter_nothing,
) -> Transport:
    """Return a new transport of the driver with this name; the caller closes it.

    ``options`` are keyword arguments for the driver's constructor, configured as
    ``driver_options``. ``enter``, which the calling thread has done, is passed to a driver that
    takes it (see ``kvferry.core.transport.api``).

    Raises ``DriverError``, which says what to do, if there is not one such driver, or it cannot be
    loaded, is of another interface version, refuses the options, or does not start.
    """
    driver, given = load(name), dict(options or {})
    ours = {ENTER: enter} if takes_enter(driver) else {}
    try:
        return driver(**given, **ours)
    except DriverError:
        raise
    # A driver is foreign code: whatever it raises, the user gets a ``DriverError`` with the name of
    # the driver, and the original exception as its cause.
    except Exception as exc:
        takes = ", ".join(sorted({*inspect.signature(driver).parameters} - {*ours})) or "none"
        raise DriverError(
            f"driver {name!r} does not start: {type(exc).__name__}: {exc}; check driver_options "
            f"(it takes: {takes}) and what {_info(_entry(name)).distribution} says it needs"
        ) from exc


def load(name: str) -> type[Transport]:
    """Import the driver with this name, check its interface version, and return its class.

    Raises ``DriverError`` as ``create`` does before it calls the class.
    """
    entry = _entry(name)
    info = _info(entry)
    # stevedore would take its list from a file in the user's cache folder, which can be out of date
    # and is written when it is missing. So it is given the entry point that was found here.
    DriverManager.ENTRY_POINT_CACHE[GROUP] = [entry]
    try:
        driver: object = DriverManager(GROUP, name).driver
    # A driver is foreign code; see ``create``.
    except Exception as exc:
        raise DriverError(
            f"driver {name!r} ({info.entry_point}) cannot be imported: {type(exc).__name__}: "
            f"{exc}; install what it needs, or reinstall {info.distribution} {info.version}"
        ) from exc
    if fault := _fault_of(driver, info):
        raise DriverError(
            f"driver {name!r}{fault}; that is a fault of {info.distribution} {info.version}: "
            "report it there"
        )
    found = cast("type[Transport]", driver)
    if (version := found.interface_version)[0] != INTERFACE_VERSION[0]:
        theirs, ours = (".".join(map(str, each)) for each in (version, INTERFACE_VERSION))
        raise DriverError(
            f"driver {name!r} is written for version {theirs} of the transport interface, and this "
            f"kvferry has {ours}: install versions of {info.distribution} and kvferry whose major "
            "versions agree"
        )
    return found


def _fault_of(driver: object, info: DriverInfo) -> str:
    if not (isinstance(driver, type) and issubclass(driver, Transport)):
        what = f"{info.entry_point} is {driver!r}"
        return f": {what}, not a subclass of kvferry.core.transport.Transport"
    if inspect.isabstract(driver):
        return f" lacks {', '.join(sorted(driver.__abstractmethods__))}"
    match driver.interface_version:
        case (int(), int()):
            return ""
        case other:
            return f" has interface_version {other!r}, not two numbers"


def describe(info: DriverInfo) -> DriverReport:
    """Start a driver without options; return what it can do here, or why it does not work.

    Never raises: whatever the driver raises becomes the report's ``reason``.
    """
    try:
        transport = create(info.name)
        try:
            return DriverReport(
                info=info, capabilities=transport.capabilities, library=transport.library
            )
        finally:
            transport.close()
    except DriverError as exc:
        return DriverReport(info=info, reason=str(exc))
    except Exception as exc:  # noqa: BLE001 - foreign code; see create
        return DriverReport(info=info, reason=f"{type(exc).__name__}: {exc}")


def _entries() -> list[EntryPoint]:
    # The same distribution can be found twice: as an editable install, and in its source tree.
    return list({(_info(entry)): entry for entry in entry_points(group=GROUP)}.values())


def _info(entry: EntryPoint) -> DriverInfo:
    return DriverInfo(
        name=entry.name,
        distribution=entry.dist.name if entry.dist else "unknown",
        version=entry.dist.version if entry.dist else "unknown",
        entry_point=entry.value,
    )


def _entry(name: str) -> EntryPoint:
    """Return the only entry point with this name, without importing anything."""
    found = [entry for entry in _entries() if entry.name == name]
    if not found:
        known = sorted({entry.name for entry in _entries()})
        near = difflib.get_close_matches(name, known, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise DriverError(
            f"no driver {name!r} is installed; installed: {', '.join(known) or 'none'}.{meant} A "
            f"driver comes with a distribution that has an entry point in the group {GROUP!r}: "
            "install it into this environment"
        )
    if len(found) > 1:
        owners = " and ".join(f"{i.distribution} {i.version}" for i in map(_info, found))
        raise DriverError(f"driver {name!r} is offered by {owners}: uninstall all but one of them")
    return found[0]
