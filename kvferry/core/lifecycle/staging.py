"""Copies between device and host pages, and which of them a rank begins for its loads.

The caller makes the copies (docs/protocol.md, "Staging").
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvferry.core.errors import CopyError, KVFerryError
from kvferry.core.lifecycle.holds import Hold, RequestId
from kvferry.core.lifecycle.loads import LoadId


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """A copy of whole blocks to or from as many host pages; ``CopyError`` if numbers differ."""

    blocks: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.pages):
            raise CopyError(
                f"a copy of {len(self.blocks)} blocks names {len(self.pages)} host pages: it needs "
                "one for each block"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldCopy:
    """The copy that fills the host pages of a ticket."""

    request: RequestId
    hold: Hold
    copy: PageCopy


class _At(enum.Enum):
    DEVICE = "device"
    """The device has not finished its earlier work on the blocks."""
    FENCE = "fence"
    """The device has, but the load is not over."""
    COPYING = "copying"


@dataclass(slots=True, kw_only=True)
class _StagedLoad:
    copy: PageCopy
    at: _At = _At.DEVICE
    is_loaded: bool = False
    error: KVFerryError | None = None


class StagedLoads:
    """Copy loaded pages from the host to the device, and report each load once.

    A copy begins when the load has succeeded, its fence included, *and* the device has finished its
    earlier work on the blocks. So no byte that the fence did not accept reaches a block. A load
    that failed is reported without a copy. Not thread-safe.
    """

    def __init__(self) -> None:
        self._loads: dict[LoadId, _StagedLoad] = {}
        self._copies: list[tuple[LoadId, PageCopy]] = []
        self._over: list[tuple[LoadId, KVFerryError | None]] = []

    def __len__(self) -> int:
        """Return how many loads are not over."""
        return len(self._loads)

    def __contains__(self, load_id: LoadId) -> bool:
        return load_id in self._loads

    def begin(self, load_id: LoadId, copy: PageCopy) -> None:
        """Add a load into host pages."""
        self._loads[load_id] = _StagedLoad(copy=copy)

    def passed(self, load_id: LoadId) -> None:
        """Record that the device has finished its earlier work on a load's blocks."""
        load = self._loads.get(load_id)
        if load is not None and load.at is _At.DEVICE:
            load.at = _At.FENCE
            self._proceed(load_id, load)

    def loaded(self, load_id: LoadId, error: KVFerryError | None) -> None:
        """Record that a load, failed or not, is over: no byte lands in its host pages."""
        load = self._loads.get(load_id)
        if load is not None and not load.is_loaded:
            load.is_loaded = True
            load.error = load.error or error
            self._proceed(load_id, load)

    def copied(self, load_id: LoadId) -> None:
        """Report a load whose copy has passed."""
        load = self._loads.get(load_id)
        if load is not None and load.at is _At.COPYING:
            self._end(load_id, load)

    def failed(self, load_id: LoadId, error: KVFerryError) -> None:
        """Have a load fail whose copy has failed or cannot begin, as ``WorkerHolds.failed``."""
        load = self._loads.get(load_id)
        if load is None:
            return
        load.error = load.error or error
        if load.is_loaded:
            self._end(load_id, load)

    def take_copies(self) -> list[tuple[LoadId, PageCopy]]:
        """Return the copies to begin, from the host to the device. Each is returned once."""
        copies, self._copies = self._copies, []
        return copies

    def take_over(self) -> list[tuple[LoadId, KVFerryError | None]]:
        """Return the loads to report, each with why it failed (``None`` if it did not), once."""
        over, self._over = self._over, []
        return over

    def _proceed(self, load_id: LoadId, load: _StagedLoad) -> None:
        if not load.is_loaded:
            return
        if load.error is not None:
            self._end(load_id, load)
        elif load.at is _At.FENCE:
            load.at = _At.COPYING
            self._copies.append((load_id, load.copy))

    def _end(self, load_id: LoadId, load: _StagedLoad) -> None:
        del self._loads[load_id]
        self._over.append((load_id, load.error))
