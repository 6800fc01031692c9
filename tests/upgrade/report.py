"""The report of ``make upgrade``: results of checks, and a summary."""

from __future__ import annotations

import time

from rich.console import Console

_SHOWN = {True: "[green]yes[/]", False: "[red]NO[/] "}


class Report:
    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self._heading = ""
        self._checked = 0
        self._failed: list[str] = []

    def heading(self, text: str) -> None:
        self._heading = text
        self._console.print(f"\n[bold]{text}[/]")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def check(self, what: str, holds: bool, why: str = "") -> None:
        """Print the result of a check."""
        self._checked += 1
        self._console.print(f"  {_SHOWN[holds]} {what}")
        if not holds:
            self._failed.append(f"{self._heading}: {what}")
            if why:
                self._console.print(why, markup=False)

    def conclude(self) -> bool:
        """Print the number of checks and the failed ones; return whether none failed."""
        seconds = time.monotonic() - self._began
        right = self._checked - len(self._failed)
        self.heading(f"{right} of {self._checked} hold ({seconds:.0f} s)")
        for what in self._failed:
            self._console.print(f"  [red]NO[/]  {what}")
        return not self._failed and self._checked > 0
