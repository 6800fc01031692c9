"""A process that runs a file of one of the trees, with commands in lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.upgrade.trees import Tree

END_SECONDS = 10.0
EXCERPT = 4000
"""Characters of a log that an error shows."""


class ChildError(Exception):
    """A process refused, ended or does not answer; the message has the end of its output."""


class Child:
    """A process. Closing it twice is fine.

    It has a session of its own, so that Ctrl-C is heard by the parent alone, which then ends it. If
    the parent is killed, it ends by itself, for there is nothing more to read.
    """

    def __init__(
        self,
        tree: Tree,
        file: Path,
        settings: dict[str, Any],
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = f"{tree.name} {file.stem}"
        self._log = tree.scratch / f"{file.stem}-{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(file)],
                cwd=tree.scratch,
                env=tree.environment | (environment or {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._unread = b""
        self._send(settings)

    def ask(self, do: str, *, patience: float = 120.0, **arguments: Any) -> Any:
        self._send({"do": do, **arguments})
        return self.answer(patience)

    def answer(self, seconds: float = 120.0) -> Any:
        """Wait for the next answer: the first one comes when the process is ready."""
        line = self._line(time.monotonic() + seconds)
        if line is None:
            raise ChildError(f"the {self.name} is silent for {seconds:.0f} s:\n{self.tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise ChildError(f"the {self.name} says: {reply['error']}\n{self.tail()}")
        return reply["answer"]

    def tail(self) -> str:
        return self._log.read_text("utf-8", "replace")[-EXCERPT:]

    def begin_close(self) -> None:
        """Tell the process to end, without waiting for that."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def close(self, seconds: float) -> None:
        """End the process and its children; kill them after ``seconds``."""
        self.begin_close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as exc:
            raise ChildError(f"the {self.name} has ended:\n{self.tail()}") from exc

    def _line(self, deadline: float) -> bytes | None:
        """Return the next line; ``None`` if there is none in time."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    return None
                data = os.read(self._process.stdout.fileno(), 1 << 20)
                if not data:
                    raise ChildError(f"the {self.name} has ended:\n{self.tail()}")
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line


@contextmanager
def closing_all(children: Collection[Child]) -> Iterator[None]:
    """End processes when the block ends: at once, unless it ended as it should."""
    seconds = 0.0
    try:
        yield
        seconds = END_SECONDS
    finally:
        for child in children:
            child.begin_close()
        until = time.monotonic() + seconds
        for child in children:
            child.close(max(until - time.monotonic(), 0.0))
