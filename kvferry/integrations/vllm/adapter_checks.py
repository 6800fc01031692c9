"""The contents of the LoRA adapters of requests, as the scheduler half sees them, for the digest.

A content counts only if vLLM's workers loaded the adapter from files with it (ADR 17).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.core.error_causes import on_one_line
from kvferry.core.lru_cache import LRUCache
from kvferry.integrations.vllm.adapter_hashes import (
    UNKNOWN,
    AdapterContents,
    AdapterError,
    AdapterLoad,
    AdapterReport,
)

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

WAIT_SECONDS = 30.0
"""How long a request waits for its adapter's content; then the content counts as unknown."""

PACKED_EXPERTS = b"3d"
"""Appended to the content if vLLM was told to read the weights as ``is_3d_lora_weight``."""

MAX_ADAPTERS = 4096
"""How many adapters' loads and weights are remembered, about 1 kB per adapter and rank."""


def lora_settings(config: LoRAConfig | None) -> bytes:
    """Return the settings that decide how an engine applies adapters, as JSON; empty by default."""
    modules = getattr(config, "target_modules", None)  # older versions of vLLM lack it
    shared = getattr(config, "enable_moe_shared_loras", False)
    if modules is None and not shared:
        return b""
    names = None if modules is None else sorted(set(modules))
    return json.dumps({"enable_moe_shared_loras": shared, "target_modules": names}).encode()


@dataclass(slots=True, kw_only=True)
class _Follower:
    """A request with an adapter."""

    lora: LoRARequest
    # The first step that was built after the request came. When the workers have answered it, they
    # have reported every load before the request came.
    step: int
    deadline: float  # when the request stops waiting
    hashing: Future[object] | None = None  # of the adapter's files
    waiting: bool = True
    is_late: bool = False  # it waited until its deadline
    loads: set[bytes] = field(default_factory=set)  # what the request may be computed with
    content: bytes | None = None  # what a ticket was made or accepted for


class Adapters:
    """Follow requests with LoRA adapters from their arrival to their end.

    With ``prefix_caching``, vLLM keeps blocks by the adapter's name and path, whatever the content.
    ``settings`` (``lora_settings``) are appended to every content.
    """

    def __init__(
        self,
        *,
        prefix_caching: bool,
        settings: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix_caching = prefix_caching
        self._settings = settings
        self._clock = clock
        self._contents = AdapterContents()
        self._thread = ThreadPoolExecutor(1, "kvferry-adapters")
        self._followers: dict[str, _Follower] = {}
        # Requests that have ended, until the workers' report of their last step.
        self._ended: dict[str, _Follower] = {}
        # The content of each adapter's last load, by vLLM's number of the adapter and by rank.
        self._loaded = LRUCache[dict[int, bytes]](MAX_ADAPTERS)
        self._newest = 0  # the highest number of an adapter that was loaded
        # The content that vLLM may have computed cached blocks with, by its key for blocks;
        # ``UNKNOWN`` if there were several.
        self._used = LRUCache[bytes](MAX_ADAPTERS)
        self._step = 0
        self._answered = 0

    def follow(self, request: Request) -> None:
        """Begin to find out the content of a request's adapter, if it has one."""
        lora = request.lora_request
        if lora is None or request.request_id in self._followers:
            return
        follower = _Follower(lora=lora, step=self._step + 1, deadline=self._clock() + WAIT_SECONDS)
        self._followers[request.request_id] = follower
        self._loaded.get(lora.lora_int_id)  # so that it is not forgotten
        with suppress(AdapterError):  # ``content`` says so
            if self._contents.known(lora.lora_path) is None:
                follower.hashing = self._thread.submit(self._contents.read, lora.lora_path)

    def waits(self, request: Request) -> bool:
        """Return whether a request must wait until the content of its adapter is known."""
        follower = self._followers.get(request.request_id)
        if follower is None or not follower.waiting:
            return False
        is_hashing = follower.hashing is not None and not follower.hashing.done()
        is_unknown = is_hashing or not self._knows_loads(follower)
        follower.is_late = is_unknown and self._clock() >= follower.deadline
        follower.waiting = is_unknown and not follower.is_late
        if not follower.waiting:
            self._computes_with(follower, self._last_loads(follower.lora))
        return follower.waiting

    def content(self, request: Request) -> bytes | None:
        """Return the content of a request's adapter; ``None`` if the request has none.

        ``AdapterError`` if it is not known, or is not what the engine computes with.
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
            content = self._verified(follower)
        except AdapterError as exc:
            raise AdapterError(f"adapter {lora.lora_name[:64]!r}: {exc}") from exc
        follower.content = content
        self._use(_cache_key(lora), [content])
        packed = PACKED_EXPERTS if getattr(lora, "is_3d_lora_weight", False) else b""
        return content + packed + self._settings

    def end(self, request_id: str) -> None:
        """Follow a request no longer, once the workers have reported its last step."""
        follower = self._followers.pop(request_id, None)
        if follower is not None:
            self._ended[request_id] = follower

    def next_step(self) -> int:
        """Count a step that is built now; return its number if workers must answer it, else 0."""
        if not any(follower.waiting for follower in self._followers.values()):
            return 0
        self._step += 1
        return self._step

    def reported(self, report: AdapterReport) -> list[str]:
        """Process what all ranks report of a step.

        Returns the requests that have just ended and whose ticket must not be used, because the
        engine loaded other files while it computed them.
        """
        for load in report.loads:
            ranks = self._loaded.get(load.adapter) or {}
            self._loaded.put(load.adapter, ranks | {load.rank: load.content})
            self._newest = max(self._newest, load.adapter)
            self._use((load.name, load.path), [load.content])
            if load.content != UNKNOWN:
                self._contents.learn(load.path, load.version, load.content)
        self._answered = max(self._answered, report.step)
        ended, self._ended = self._ended, {}
        self._check_followers(self._followers, report.loads)
        return self._check_followers(ended, report.loads)

    def contradicted(self, report: AdapterReport) -> list[str]:
        """Return the requests that have not ended, and whose ticket is not for what was loaded."""
        if not report.loads:  # as in most steps
            return []
        return [
            request_id
            for request_id, follower in self._followers.items()
            if follower.content is not None
            and _loaded_for(follower, report.loads) - {follower.content}
        ]

    def close(self) -> None:
        """End the thread that hashes, after the adapter that it hashes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _last_loads(self, lora: LoRARequest) -> set[bytes]:
        return set((self._loaded.get(lora.lora_int_id) or {}).values())

    def _knows_loads(self, follower: _Follower) -> bool:
        """Return whether the workers have reported all loads before a request came."""
        if self._answered >= follower.step:
            return True
        loads = self._last_loads(follower.lora)
        try:  # workers need not be asked if they have loaded the current files
            return bool(loads) and loads == {self._current(follower)}
        except AdapterError:
            return True  # no report can change that

    def _verified(self, follower: _Follower) -> bytes:
        if follower.is_late:
            raise AdapterError(
                f"its files were not hashed, or no load reported, within {WAIT_SECONDS:.0f} s"
            )
        lora, path = follower.lora, follower.lora.lora_path
        content, loads = self._current(follower), self._last_loads(lora)
        # vLLM's numbers ascend, so a higher one was never loaded.
        may_be_forgotten = len(self._loaded) == MAX_ADAPTERS and lora.lora_int_id <= self._newest
        if may_be_forgotten and not loads:
            raise AdapterError(
                f"more than {MAX_ADAPTERS} adapters were loaded, and the connector may have "
                "forgotten the load of this one: unload the adapter, and load it again"
            )
        if (loads | follower.loads) - {content}:
            raise AdapterError(
                f"its files in {path[:200]!r} are not those that the engine loaded: load "
                "the adapter again, under a new path"
            )
        if self._prefix_caching and self._used.get(_cache_key(lora)) not in (None, content):
            raise AdapterError(
                f"the engine used other weights for {path[:200]!r} before, and vLLM "
                "keeps blocks of those in its prefix cache: load changed weights from a new path"
            )
        return content

    def _current(self, follower: _Follower) -> bytes:
        """Return the content of an adapter's files as they are now."""
        path, hashing = follower.lora.lora_path, follower.hashing
        content = self._contents.known(path)
        if content is not None:
            return content
        if hashing is not None and hashing.done() and (failure := hashing.exception()) is not None:
            raise AdapterError(str(failure)) from failure
        raise AdapterError(
            f"its files in {path[:200]!r} changed after they were hashed: load changed weights "
            "from a new path"
        )

    def _check_followers(
        self, followers: dict[str, _Follower], loads: Sequence[AdapterLoad]
    ) -> list[str]:
        """Note new loads; return the ids of requests whose ticket is for other content."""
        wrong = []
        for request_id, follower in followers.items():
            mine = _loaded_for(follower, loads)
            if follower.waiting or not mine:
                continue
            self._computes_with(follower, mine)
            if follower.content is not None and mine != {follower.content}:
                wrong.append(request_id)
                logger.warning(
                    "request %s: adapter %s was loaded with other weights than its ticket is for "
                    "(cause adapter): load changed weights under a new name or path",
                    on_one_line(request_id),
                    on_one_line(follower.lora.lora_name, 64),
                )
        return wrong

    def _computes_with(self, follower: _Follower, contents: Iterable[bytes]) -> None:
        """Note contents that a request, and so the blocks that vLLM caches, may have."""
        follower.loads.update(contents)
        self._use(_cache_key(follower.lora), follower.loads)

    def _use(self, key: tuple[str, str], contents: Iterable[bytes]) -> None:
        for content in contents:
            used = self._used.get(key)
            self._used.put(key, content if used in (None, content) else UNKNOWN)


def _loaded_for(follower: _Follower, loads: Iterable[AdapterLoad]) -> set[bytes]:
    return {load.content for load in loads if load.adapter == follower.lora.lora_int_id}


def _cache_key(lora: LoRARequest) -> tuple[str, str]:
    """Return by what vLLM's prefix cache tells blocks of an adapter from those of others."""
    return lora.lora_name, lora.lora_path
