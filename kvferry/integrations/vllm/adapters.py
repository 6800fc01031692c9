"""The LoRA adapters of requests, as the scheduler half sees them: their content, for the digest.

The content is a hash of the adapter's files, and counts only if vLLM's workers loaded the adapter
from files with this content. ADR 34 has the argument.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.error_causes import on_one_line
from kvferry.integrations.vllm.adapter_files import (
    AdapterError,
    AdapterHashes,
    AdapterVersion,
    adapter_version,
)
from kvferry.integrations.vllm.adapter_loads import AdapterLoad, AdapterReport

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

WAIT_SECONDS = 30.0
"""How long a request waits for its adapter's content; then the content counts as unknown."""

PACKED_EXPERTS = b"3d"
"""Appended to the content if vLLM was told to read the weights as ``is_3d_lora_weight``."""


@dataclass(slots=True, kw_only=True)
class _Follower:
    """A request with an adapter.

    Attributes:
        lora: vLLM's description of the adapter.
        step: The first step that was built after the request came. When the workers have answered
            this step, they have reported every load before the request came.
        deadline: When the request stops waiting.
        waiting: Whether the request still waits.
        problem: Why the content counts as unknown from now on.
        content: The content that a ticket was made or accepted for.
    """

    lora: LoRARequest
    step: int
    deadline: float
    waiting: bool = True
    problem: str | None = None
    content: bytes | None = None


class Adapters:
    """Follow requests with LoRA adapters from their arrival to their end.

    Args:
        prefix_caching: Whether the engine keeps blocks for later prompts. vLLM keeps them by the
            adapter's name and path, whatever the content.
        hashes: Hashes files; by default, on a thread of its own.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        *,
        prefix_caching: bool,
        hashes: AdapterHashes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix_caching = prefix_caching
        self._hashes = hashes or AdapterHashes()
        self._clock = clock
        self._followers: dict[str, _Follower] = {}
        # Requests that have ended, until the workers' report of their last step.
        self._ended: dict[str, _Follower] = {}
        # The last load of each adapter, by vLLM's number of the adapter and by rank.
        self._loaded: dict[int, dict[int, AdapterLoad]] = {}
        # All versions that vLLM may have computed cached blocks with, by its key for blocks.
        self._used: dict[tuple[str, str], set[AdapterVersion | None]] = {}
        self._step = 0
        self._answered = 0

    def follow(self, request: Request) -> None:
        """Begin to find out the content of a request's adapter.

        Args:
            request: vLLM's request; ignored if it has no adapter.
        """
        lora = request.lora_request
        if lora is None or request.request_id in self._followers:
            return
        self._followers[request.request_id] = _Follower(
            lora=lora, step=self._step + 1, deadline=self._clock() + WAIT_SECONDS
        )
        try:
            version = adapter_version(lora.lora_path)
        except AdapterError:
            return  # ``content`` says so
        if self._hashes.known(version) is None:
            self._hashes.start(lora.lora_path)

    def waits(self, request: Request) -> bool:
        """Return whether a request must wait until the content of its adapter is known.

        Args:
            request: vLLM's request.
        """
        follower = self._followers.get(request.request_id)
        if follower is None or not follower.waiting:
            return False
        hashing = self._hashes.in_progress(follower.lora.lora_path)
        follower.waiting = hashing or not self._knows_loads(follower)
        if follower.waiting and self._clock() >= follower.deadline:
            missing = "its files were not hashed" if hashing else "the workers did not report it"
            follower.problem = f"{missing} within {WAIT_SECONDS:.0f} s"
            follower.waiting = False
        return follower.waiting

    def content(self, request: Request) -> bytes | None:
        """Return the content of a request's adapter.

        Returns:
            The content; ``None`` if the request has no adapter. Equal contents mean that engines
            of the same model compute the same pages with the adapters.

        Raises:
            AdapterError: The content is not known, or is not what the engine computes with.
        """
        lora = request.lora_request
        if lora is None:
            return None
        follower = self._followers.get(request.request_id)
        if follower is None or follower.waiting:
            raise AdapterError(
                f"adapter {lora.lora_name[:64]!r}: its content was not known when the request "
                "began (vLLM does not wait for that if prompt_logprobs are asked for)"
            )
        try:
            version, content = self._verified(follower)
        except AdapterError as exc:
            raise AdapterError(f"adapter {lora.lora_name[:64]!r}: {exc}") from exc
        follower.content = content
        self._used.setdefault(_cache_key(lora), set()).add(version)
        return content + PACKED_EXPERTS if getattr(lora, "is_3d_lora_weight", False) else content

    def end(self, request_id: str) -> None:
        """Follow a request no longer, once the workers have reported its last step.

        Args:
            request_id: vLLM's id of the request.
        """
        follower = self._followers.pop(request_id, None)
        if follower is not None and follower.content is not None:
            self._ended[request_id] = follower

    def next_step(self) -> int:
        """Count a step that is built now.

        Returns:
            The number of the step if the workers must answer it, otherwise 0.
        """
        if not any(follower.waiting for follower in self._followers.values()):
            return 0
        self._step += 1
        return self._step

    def reported(self, report: AdapterReport) -> list[str]:
        """Process what the workers report of a step.

        Args:
            report: The merged reports of all ranks; an empty report if there is none.

        Returns:
            The ids of the requests that have just ended and whose ticket must not be used, because
            the engine loaded other files while it computed them.
        """
        for load in report.loads:
            self._loaded.setdefault(load.adapter, {})[load.rank] = load
            self._used.setdefault((load.name, load.path), set()).add(load.version)
        self._answered = max(self._answered, report.step)
        ended, self._ended = self._ended, {}
        self._check_followers(self._followers.items(), report.loads)
        return self._check_followers(ended.items(), report.loads)

    def close(self) -> None:
        """End the thread that hashes. Calling it again has no effect."""
        self._hashes.close()

    def _knows_loads(self, follower: _Follower) -> bool:
        """Return whether the workers have reported all loads before a request came.

        They need not be asked if the last load that they reported is of the current files.
        """
        if self._answered >= follower.step:
            return True
        if follower.lora.lora_int_id not in self._loaded:
            return False
        try:
            _, content = self._current(follower.lora)
        except AdapterError:
            return True  # no report can change that
        return self._difference(follower.lora, content) is None

    def _verified(self, follower: _Follower) -> tuple[AdapterVersion, bytes]:
        """Return the version and content of a request's adapter, if the engine computes with it.

        Raises:
            AdapterError: The content is not known, or is not what the engine computes with.
        """
        if follower.problem is not None:
            raise AdapterError(follower.problem)
        version, content = self._current(follower.lora)
        if (difference := self._difference(follower.lora, content)) is not None:
            self._used_unknown(follower.lora)
            raise AdapterError(difference)
        return version, content

    def _current(self, lora: LoRARequest) -> tuple[AdapterVersion, bytes]:
        """Return the version and content of the files as they are now.

        Raises:
            AdapterError: The files are gone, or changed since they were hashed.
        """
        version = adapter_version(lora.lora_path)
        content = self._hashes.known(version)
        if content is None:
            failure = self._hashes.failure(lora.lora_path)
            raise AdapterError(
                failure
                or f"its files in {lora.lora_path[:200]!r} changed after they were hashed: load "
                "changed weights from a new path"
            )
        return version, content

    def _difference(self, lora: LoRARequest, content: bytes) -> str | None:
        """Return how the engine's loads differ from a content; ``None`` if they do not.

        Args:
            lora: The adapter.
            content: The hash of the adapter's files.
        """
        loads = self._loaded.get(lora.lora_int_id, {}).values()
        if any(self._hashes.known(load.version) != content for load in loads):
            return (
                f"its files in {lora.lora_path[:200]!r} are not those that the engine loaded: load "
                "the adapter again, under a new path"
            )
        used = self._used.get(_cache_key(lora), set())
        if self._prefix_caching and any(self._hashes.known(each) != content for each in used):
            return (
                f"the engine used other weights for {lora.lora_path[:200]!r} before, and vLLM "
                "keeps blocks of those in its prefix cache: load changed weights from a new path"
            )
        return None

    def _check_followers(
        self, followers: Iterable[tuple[str, _Follower]], loads: Iterable[AdapterLoad]
    ) -> list[str]:
        """Find the requests whose adapter was loaded from other files after they were computed.

        Args:
            followers: The requests, by id.
            loads: The new loads.

        Returns:
            The ids of those requests that have a ticket, or whose ticket was accepted.
        """
        wrong = []
        for request_id, follower in followers:
            if follower.waiting or not (mine := _loads_of(follower, loads)):
                continue
            if follower.content is None:
                follower.problem = self._reload_problem(follower, mine)
                if follower.problem is not None:
                    self._used_unknown(follower.lora)
            elif any(self._hashes.known(load.version) != follower.content for load in mine):
                follower.problem = "the engine loaded other files for it while it computed"
                self._used_unknown(follower.lora)
                wrong.append(request_id)
                logger.warning(
                    "request %s: adapter %s was loaded with other weights than its ticket is for "
                    "(cause adapter): load changed weights under a new name or path",
                    on_one_line(request_id),
                    on_one_line(follower.lora.lora_name, 64),
                )
        return wrong

    def _used_unknown(self, lora: LoRARequest) -> None:
        """Record that blocks in vLLM's prefix cache may be of other weights than their key says.

        Args:
            lora: The adapter of a request that was computed with other weights.
        """
        self._used.setdefault(_cache_key(lora), set()).add(None)

    def _reload_problem(self, follower: _Follower, loads: list[AdapterLoad]) -> str | None:
        """Return why loads during a request leave its pages without a content, if they do.

        Args:
            follower: The request.
            loads: The loads of its adapter, reported after the request had stopped waiting.
        """
        contents = {self._hashes.known(load.version) for load in loads}
        try:
            _, content = self._current(follower.lora)
        except AdapterError as exc:
            return str(exc)
        if contents == {content}:
            return follower.problem
        return "the engine loaded other files for it while it computed"


def _loads_of(follower: _Follower, loads: Iterable[AdapterLoad]) -> list[AdapterLoad]:
    """Return the loads of a request's adapter."""
    return [load for load in loads if load.adapter == follower.lora.lora_int_id]


def _cache_key(lora: LoRARequest) -> tuple[str, str]:
    """Return by what vLLM's prefix cache tells blocks of an adapter from those of others."""
    return lora.lora_name, lora.lora_path
