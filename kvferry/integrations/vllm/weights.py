"""Which weights an engine computes with, so that pages are never decoded by others.

vLLM keeps a version, which a trainer sets once it has loaded other weights
(``finish_weight_update``, ``update_weight_version``); it is ``"default"`` before. Where a trainer
does not set it, kvferry counts how often weights were loaded since. Tickets name both.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import TicketError, TicketReason
from kvferry.integrations.vllm.agreement import truncated

MAX_CHARACTERS = 200
"""How many characters of a version a ticket has at most; longer ones end with a digest of all."""


@dataclass(slots=True)
class Weights:
    """The weights of an engine."""

    _named: str = "default"
    _loads: int = 0
    """How often weights were loaded since they were named."""

    @property
    def version(self) -> str:
        """What tickets name."""
        times = "once" if self._loads == 1 else f"{self._loads} times"
        return f"{self._named}, loaded {times} since" if self._loads else self._named

    def set(self, version: object) -> None:
        """Take the version that vLLM was given, which a client chooses."""
        text = str(version).encode("utf-8", "backslashreplace").decode()
        self._named, self._loads = truncated(text, MAX_CHARACTERS), 0

    def loaded(self) -> None:
        """Count that other weights were loaded; their version may follow."""
        self._loads += 1

    def check(self, version: str) -> None:
        """Raise ``TicketError`` if a ticket is for other weights; older builds name none."""
        if version and version != self.version:
            raise TicketError(
                f"it was computed with weights of version {version!r}, and this engine has version "
                f"{self.version!r}: load the same weights into both engines, and give both the "
                "version (finish_weight_update, or POST /update_weight_version)",
                reason=TicketReason.WEIGHTS,
            )
