"""Which weights an engine computes with, as far as vLLM knows: the version that a trainer sets.

It is set once new weights are loaded (``finish_weight_update``, ``update_weight_version``), and is
``"default"`` until then. Tickets name it, so that pages are never decoded by other weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import TicketError, TicketReason
from kvferry.integrations.vllm.compatibility import truncated

MAX_CHARACTERS = 200
"""How many characters of a version a ticket has at most; longer ones end with a digest of all."""


@dataclass(slots=True)
class Weights:
    """The version of an engine's weights; with ``enforced`` false, tickets may name another."""

    enforced: bool = True
    version: str = "default"

    def set(self, version: object) -> None:
        """Take the version that vLLM was given, which a client chooses."""
        text = str(version).encode("utf-8", "backslashreplace").decode()
        self.version = truncated(text, MAX_CHARACTERS)

    def check(self, version: str) -> None:
        """Raise ``TicketError`` if a ticket is for other weights; older builds name none."""
        if self.enforced and version and version != self.version:
            raise TicketError(
                f"it was computed with weights of version {version!r}, and this engine has version "
                f"{self.version!r}: load the same weights into both engines, and give both the "
                "version (finish_weight_update, or POST /update_weight_version)",
                reason=TicketReason.WEIGHTS,
            )
