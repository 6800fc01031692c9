"""The LoRA adapters of requests, as the scheduler half sees them: their content, for the digest.

The content is a hash of the adapter's files, and counts only if vLLM's workers loaded the adapter
from files with this content. ADR 17 has the argument.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvferry.core.error_causes import on_one_line
from kvferry.core.lru_cache import LRUCache
from kvferry.integrations.vllm.adapter_files import (
    AdapterError,
    AdapterHashes,
    AdapterVersion,
    adapter_version,
)
from kvferry.integrations.vllm.adapter_loads import AdapterLoad, AdapterReport

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

MAX_WEIGHTS = 16
"""How many weights of one name and path are told apart."""


def lora_settings(config: LoRAConfig | None) -> bytes:
    """Return the settings of an engine that decide how its adapters are applied, as JSON.

    Args:
        config: vLLM's configuration of LoRA, ``None`` without LoRA.

    Returns:
        Empty if the settings have vLLM's defaults.
    """
    modules = getattr(config, "target_modules", None)  # older versions of vLLM lack it
    shared = getattr(config, "enable_moe_shared_loras", False)
    if modules is None and not shared:
        return b""
    names = None if modules is None else sorted(set(modules))
    return json.dumps({"enable_moe_shared_loras": shared, "target_modules": names}).encode()


class _Files(NamedTuple):
    """Weights whose hash is not known.

    Attributes:
        path: The folder that they were loaded from.
        version: The version of the files; ``None`` if the version is not known either.
    """

    path: str
    version: AdapterVersion | None


_Weights = bytes | _Files
"""What vLLM loaded or computed with: the hash once it is known, until then the files."""


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
        settings: The engine's settings for LoRA (``lora_settings``), appended to every content.
        hashes: Hashes files; by default, on a thread of its own.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        *,
        prefix_caching: bool,
        settings: bytes = b"",
        hashes: AdapterHashes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix_caching = prefix_caching
        self._settings = settings
        self._hashes = hashes or AdapterHashes()
        self._clock = clock
        self._followers: dict[str, _Follower] = {}
        # Requests that have ended, until the workers' report of their last step.
        self._ended: dict[str, _Follower] = {}
        # The last load of each adapter, by vLLM's number of the adapter and by rank. The least
        # recently used adapter is first.
        self._loaded: OrderedDict[int, dict[int, _Weights]] = OrderedDict()
        # The highest number of an adapter whose loads were forgotten.
        self._forgotten = 0
        # All weights that vLLM may have computed cached blocks with, by its key for blocks.
        self._used = LRUCache[set[_Weights]](MAX_ADAPTERS)
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
        if lora.lora_int_id in self._loaded:
            self._loaded.move_to_end(lora.lora_int_id)
        try:
            version = adapter_version(lora.lora_path)
        except AdapterError:
            return  # ``content`` says so
        if self._hashes.known(lora.lora_path, version) is None:
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
            content = self._verified(follower)
        except AdapterError as exc:
            raise AdapterError(f"adapter {lora.lora_name[:64]!r}: {exc}") from exc
        follower.content = content
        self._used_weights(_cache_key(lora), content)
        packed = PACKED_EXPERTS if getattr(lora, "is_3d_lora_weight", False) else b""
        return content + packed + self._settings

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
            ranks = self._loaded.setdefault(load.adapter, {})
            ranks[load.rank] = _Files(load.path, load.version)
            self._loaded.move_to_end(load.adapter)
            self._used_weights((load.name, load.path), ranks[load.rank])
        while len(self._loaded) > MAX_ADAPTERS:
            oldest, _ = self._loaded.popitem(last=False)
            self._forgotten = max(self._forgotten, oldest)
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
            content = self._current(follower.lora)
        except AdapterError:
            return True  # no report can change that
        return self._difference(follower.lora, content) is None

    def _verified(self, follower: _Follower) -> bytes:
        """Return the hash of a request's adapter, if the engine computes with these files.

        Raises:
            AdapterError: The content is not known, or is not what the engine computes with.
        """
        if follower.problem is not None:
            raise AdapterError(follower.problem)
        content = self._current(follower.lora)
        number = follower.lora.lora_int_id
        if number not in self._loaded and number <= self._forgotten:
            raise AdapterError(
                f"more than {MAX_ADAPTERS} adapters were loaded, and the connector may have "
                "forgotten the load of this one: unload the adapter, and load it again"
            )
        if (difference := self._difference(follower.lora, content)) is not None:
            self._used_unknown(follower.lora)
            raise AdapterError(difference)
        return content

    def _current(self, lora: LoRARequest) -> bytes:
        """Return the hash of the files as they are now.

        Raises:
            AdapterError: The files are gone, or changed since they were hashed.
        """
        content = self._hashes.known(lora.lora_path, adapter_version(lora.lora_path))
        if content is None:
            failure = self._hashes.failure(lora.lora_path)
            raise AdapterError(
                failure
                or f"its files in {lora.lora_path[:200]!r} changed after they were hashed: load "
                "changed weights from a new path"
            )
        return content

    def _difference(self, lora: LoRARequest, content: bytes) -> str | None:
        """Return how the engine's loads differ from a content; ``None`` if they do not.

        Args:
            lora: The adapter.
            content: The hash of the adapter's files.
        """
        loads = self._loaded.get(lora.lora_int_id, {})
        for rank, weights in loads.items():
            loads[rank] = self._hashed(weights)
        if any(weights != content for weights in loads.values()):
            return (
                f"its files in {lora.lora_path[:200]!r} are not those that the engine loaded: load "
                "the adapter again, under a new path"
            )
        if self._prefix_caching and self._used_weights(_cache_key(lora)) - {content}:
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
            elif self._contents(mine) != {follower.content}:
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
        self._used_weights(_cache_key(lora), _Files(lora.lora_path, None))

    def _used_weights(self, key: tuple[str, str], *more: _Weights) -> set[_Weights]:
        """Return the weights that vLLM may have computed cached blocks with.

        Args:
            key: vLLM's key for blocks (``_cache_key``).
            more: Weights to add.
        """
        used = {self._hashed(each) for each in (*(self._used.get(key) or ()), *more)}
        if len(used) > MAX_WEIGHTS:
            used = {_Files(key[1], None)}  # differs from every content, as the whole set does
        self._used.put(key, used)
        return used

    def _hashed(self, weights: _Weights) -> _Weights:
        """Return the hash of weights if it is known, otherwise the weights unchanged."""
        if isinstance(weights, bytes):
            return weights
        return self._hashes.known(weights.path, weights.version) or weights

    def _contents(self, loads: Iterable[AdapterLoad]) -> set[_Weights]:
        """Return what was loaded, as hashes where they are known."""
        return {self._hashed(_Files(load.path, load.version)) for load in loads}

    def _reload_problem(self, follower: _Follower, loads: list[AdapterLoad]) -> str | None:
        """Return why loads during a request leave its pages without a content, if they do.

        Args:
            follower: The request.
            loads: The loads of its adapter, reported after the request had stopped waiting.
        """
        try:
            content = self._current(follower.lora)
        except AdapterError as exc:
            return str(exc)
        if self._contents(loads) == {content}:
            return follower.problem
        return "the engine loaded other files for it while it computed"


def _loads_of(follower: _Follower, loads: Iterable[AdapterLoad]) -> list[AdapterLoad]:
    """Return the loads of a request's adapter."""
    return [load for load in loads if load.adapter == follower.lora.lora_int_id]


def _cache_key(lora: LoRARequest) -> tuple[str, str]:
    """Return by what vLLM's prefix cache tells blocks of an adapter from those of others."""
    return lora.lora_name, lora.lora_path
