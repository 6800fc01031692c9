"""Copies between the device's blocks and host pages (docs/protocol.md, "Staging")."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import CopyError
from kvferry.core.lifecycle.holds import Hold, RequestId


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
