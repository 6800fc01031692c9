"""What an endpoint needs of an engine whose cache it stages through host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class PageCopies(Protocol):
    """Copies between the engine's blocks on the device and host pages.

    A host page has all bytes that a block id names in all regions of the rank. Both methods begin
    the copies of one request, and return a function that is polled for whether they have passed.
    All of these are called on the endpoint's thread, one at a time; one that blocks delays other
    loads, but not the engine. The device has then finished the work on the blocks that was enqueued
    before the order, so a copy waits for nothing, and can run on a stream of its own.

    The memory on both sides belongs to the caller, who keeps it until the function has returned
    ``True``, or it or the method has raised ``CopyError``. So raise ``CopyError`` only where the
    copy reads and writes nothing any more, and return ``False`` until then. After any other
    exception, the copy's end is unknown: blocks and pages are never given back, and the endpoint
    reports a problem.
    """

    def out(self, blocks: Sequence[int], pages: Sequence[int]) -> Callable[[], bool]:
        """Begin to copy blocks to host pages.

        Args:
            blocks: ids of the blocks, at least one, without holes.
            pages: id of the host page for each.

        Returns:
            A function that returns whether all of it is in host memory, where peers can read it.

        Raises:
            CopyError: the copy cannot begin, and nothing of it has.
        """
        ...

    def into(self, pages: Sequence[int], blocks: Sequence[int]) -> Callable[[], bool]:
        """Begin to copy host pages to blocks.

        Args:
            pages: ids of the host pages, at least one.
            blocks: id of the block for each, without holes.

        Returns:
            A function that returns whether all of it is on the device, for work enqueued from then
            on.

        Raises:
            CopyError: the copy cannot begin, and nothing of it has.
        """
        ...
