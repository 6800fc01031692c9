"""Which copies between device and host pages a rank begins, and what it reports when.

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
    """Of a load: the device has, but the load is not over."""
    COPYING = "copying"
    OVER = "over"
    """The copy has passed, or none will begin."""


@dataclass(slots=True, kw_only=True)
class _Staged:
    order: HoldCopy
    at: _At = _At.DEVICE
    is_copied: bool = False
    has_ended: bool = False
    """Whether the hold has ended, so that its slot word is cleared."""


class StagedHolds:
    """Copy the pages of requests with a ticket to the host, and say when both sides are free.

    When its copy has passed, a hold's pages may be read, and its blocks are free: the request is
    *sent*. Its host pages are free when it is *over*: the hold has ended, and no copy writes them
    any more. Each request is sent once and over once. Not thread-safe.
    """

    def __init__(self) -> None:
        self._staged: dict[Hold, _Staged] = {}
        self._of: dict[RequestId, Hold] = {}
        self._copies: list[HoldCopy] = []
        self._sent: list[RequestId] = []
        self._over: list[RequestId] = []
        self._failed: list[Hold] = []

    def __len__(self) -> int:
        """Return how many holds are not over."""
        return len(self._staged)

    def __contains__(self, hold: Hold) -> bool:
        return hold in self._staged

    def order(self, order: HoldCopy) -> None:
        """Add a hold whose ticket was made. Call it before the hold can end."""
        self._staged[order.hold] = _Staged(order=order)
        self._of[order.request] = order.hold

    def passed(self, hold: Hold) -> None:
        """Begin the copy if the hold stands: the device has done the work that fills its blocks."""
        staged = self._staged.get(hold)
        if staged is not None and staged.at is _At.DEVICE:
            staged.at = _At.COPYING
            self._copies.append(staged.order)

    def copied(self, hold: Hold) -> None:
        """Free the blocks of a hold: its copy has passed, and the host pages may be read."""
        staged = self._staged.get(hold)
        if staged is not None and staged.at is _At.COPYING:
            staged.is_copied = True
            self._finish(staged)

    def failed(self, hold: Hold) -> None:
        """End a hold and free its blocks: its copy has failed, or cannot begin.

        Only if nothing reads or writes for the copy any more. Where the caller cannot tell, it must
        not call this, so that neither blocks nor host pages are ever given back.
        """
        staged = self._staged.get(hold)
        if staged is not None and staged.at is not _At.OVER:
            self._failed.append(hold)
            self._finish(staged)

    def ended(self, request: RequestId) -> None:
        """Record that a request's hold has ended: its slot word is cleared."""
        hold = self._of.get(request)
        if hold is None:
            return
        staged = self._staged[hold]
        staged.has_ended = True
        if staged.at is _At.DEVICE:
            self._finish(staged)
        elif staged.at is _At.OVER:
            self._forget(staged)

    def is_copied(self, hold: Hold) -> bool:
        """Return whether a hold's pages may be read, so that its slot word may say ``ready``."""
        staged = self._staged.get(hold)
        return staged is not None and staged.is_copied

    def take_copies(self) -> list[HoldCopy]:
        """Return the copies to begin, from the device to the host. Each is returned once."""
        copies, self._copies = self._copies, []
        return copies

    def take_failed(self) -> list[Hold]:
        """Return the holds to end because their copy has failed. Each is returned once."""
        failed, self._failed = self._failed, []
        return failed

    def take_sent(self) -> list[RequestId]:
        """Return the requests whose blocks this rank does not need any more, each once."""
        sent, self._sent = self._sent, []
        return sent

    def take_over(self) -> list[RequestId]:
        """Return the requests whose host pages this rank does not use any more, each once."""
        over, self._over = self._over, []
        return over

    def _finish(self, staged: _Staged) -> None:
        """Free the blocks: the copy is over, or will not begin."""
        staged.at = _At.OVER
        self._sent.append(staged.order.request)
        if staged.has_ended:
            self._forget(staged)

    def _forget(self, staged: _Staged) -> None:
        del self._staged[staged.order.hold], self._of[staged.order.request]
        self._over.append(staged.order.request)


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
        """Have a load fail whose copy has failed or cannot begin, as for ``StagedHolds``."""
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
