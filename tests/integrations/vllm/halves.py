"""What the tests of the scheduler half have in common: requests, both roles, tickets.

Requests, blocks and configurations are stand-ins for vLLM's, which is not needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from kvferry.core.errors import KVFerryError
from kvferry.core.lifecycle.host_pages import HostPages
from kvferry.core.lifecycle.rooms import RoomId, Rooms
from kvferry.core.lifecycle.ticket import PeerKey, Ticket
from kvferry.core.metrics import LoadRecord, Metrics
from kvferry.core.security import Access, TicketKey, TicketSecrets, generate
from kvferry.core.side_channel_messages import RoomNews
from kvferry.integrations.vllm.adapter_hashes import AdapterError
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.config import Config
from kvferry.integrations.vllm.consumer import Consumer
from kvferry.integrations.vllm.engine_facts import EngineFacts
from kvferry.integrations.vllm.prefix_cache import PrefixCache
from kvferry.integrations.vllm.producer import Producer
from kvferry.integrations.vllm.request_reports import RequestReports
from kvferry.integrations.vllm.security import SecuritySettings
from kvferry.integrations.vllm.side_channel import EngineSideChannel

SERVING = EngineSideChannel(engine="prefill", incarnation=5, host="10.0.0.1", port=5600)
PREFILL = {"do_remote_decode": True}
TICKET_KEY = TicketKey()
TTL = 480.0
TALKS: dict[str, Any] = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": TTL}
"""The settings of an engine whose answers are held for the next turn."""
STATE = CacheGroup(index=0, tokens=1 << 20, is_state=True)
WINDOW = CacheGroup(index=1, tokens=16, window=20)
SECRETS = TicketSecrets.of(["the secret of both engines"])
PEER, STRANGER = bytes([1]) * 32, bytes([2]) * 32
KEYED = Access(own=generate(), peers=frozenset({PEER}))


def request(
    tokens: int = 40,
    params: dict[str, Any] | None = None,
    *,
    computed: int | None = None,
    status: str = "FINISHED_LENGTH_CAPPED",
    name: str = "r",
) -> Any:
    """A ``Request``."""
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        prompt_embeds=None,
        prompt_is_token_ids=None,
        _all_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens if computed is None else computed,
        num_tokens=tokens,
        max_tokens=9,
        num_preemptions=0,
        kv_transfer_params=params,
        lora_request=None,
        mm_features=[],
        cache_salt=None,
        skip_reading_prefix_cache=False,
        abort_immediately=False,
        trace_headers=None,
        status=SimpleNamespace(name=status),
    )


def image(offset: int, length: int = 2, name: str = "image") -> Any:
    """A ``MultiModalFeatureSpec``."""
    return SimpleNamespace(
        identifier=name, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def step(**tokens: int) -> Any:
    """A ``SchedulerOutput`` that computes some tokens of each request."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values())
    )


def full(groups: int = 1) -> tuple[CacheGroup, ...]:
    """Groups of full attention in pages of 16 tokens."""
    return tuple(CacheGroup(index=index, tokens=16) for index in range(groups))


def facts(groups: Sequence[CacheGroup] = full(), **settings: Any) -> EngineFacts:
    """An engine; a setting is of the facts or of the configuration."""
    names = {field.name for field in fields(Config)}
    config = Config(**{name: settings.pop(name) for name in list(settings) if name in names})
    common: dict[str, Any] = {
        "engine": "decode",
        "blocks": 64,
        "security": SecuritySettings(secrets=settings.pop("secrets", None)),
        "metrics": Metrics(driver="loopback"),
        "reports": RequestReports(),
        "ticket_key": TICKET_KEY,
        "sizes": {"tp_size": 2, "pp_size": 3},
    }
    return EngineFacts(groups=tuple(groups), config=config, **(common | settings))


def producer(groups: Sequence[CacheGroup] = full(), **settings: Any) -> Producer:
    rooms, clock = settings.pop("rooms", Rooms()), settings.pop("clock", time.monotonic)
    serving = settings.pop("serving", SERVING)
    made = Producer(facts(groups, **settings), rooms=rooms, clock=clock)
    made.serving = serving
    return made


class Follower:
    """A ``RoomFollower`` that hears what a test says."""

    def __init__(self) -> None:
        self.followed: dict[str, tuple[RoomId, PeerKey]] = {}
        self._news: dict[str, RoomNews | KVFerryError] = {}

    def follow(self, name: Any, room: RoomId, producer: PeerKey) -> None:
        assert name not in self.followed
        self.followed[name] = room, producer

    def hear(self, news: RoomNews | KVFerryError, name: str = "r") -> None:
        self._news[name] = news

    def news(self, name: Any) -> RoomNews | KVFerryError | None:
        assert name in self.followed
        return self._news.pop(name, None)

    def end(self, name: Any) -> None:
        self.followed.pop(name, None)
        self._news.pop(name, None)

    @property
    def pending(self) -> bool:
        return bool(self._news)

    def close(self) -> None:
        self.followed.clear()


class Users:
    """A ``Directory`` that knows only who uses it."""

    def __init__(self) -> None:
        self.names: set[Any] = set()
        self.asked: list[Ticket] = []

    def begin(self, name: Any, ticket: Ticket) -> None:
        self.names.add(name)

    def ask(self, ticket: Ticket) -> None:
        self.asked.append(ticket)

    def end(self, name: Any) -> None:
        self.names.discard(name)


def consumer(groups: Sequence[CacheGroup] = full(), **settings: Any) -> Consumer:
    fakes: dict[str, Any] = {"directory": Users(), "follower": Follower()}
    fakes |= {name: settings.pop(name) for name in fakes if name in settings}
    return Consumer(facts(groups, **settings), prefix_cache=PrefixCache(groups), **fakes)


def blocks(*ids: int, cached: int = 0) -> Any:
    """``KVCacheBlocks`` of one group, the first ones in the prefix cache."""
    return SimpleNamespace(blocks=[listed(*ids, cached=cached)])


def listed(*ids: int, cached: int = 0) -> list[Any]:
    """``KVCacheBlock``s."""
    hashes = [b"hash"] * cached + [None] * (len(ids) - cached)
    return [
        SimpleNamespace(block_id=each, is_null=each == 0, block_hash=known)
        for each, known in zip(ids, hashes, strict=True)
    ]


def finish(made: Producer, each: Any, *ids: int) -> Any:
    """Compute a request in these blocks; its ticket, if it gets one."""
    made.take_on(each)
    return made.request_finished(each, [list(ids or (1, 2, 3))])


def ticket(
    tokens: int = 40, secrets: TicketSecrets | None = None, serving: EngineSideChannel = SERVING
) -> dict[str, Any]:
    made, each = producer(secrets=secrets, serving=serving), request(tokens, PREFILL)
    made.take_on(each)
    params = made.request_finished(each, [list(range(1, 5))])
    assert params is not None
    return params


def arrive(
    made: Consumer, params: dict[str, Any] | None = None, tokens: int = 40, **changes: Any
) -> Any:
    """A request that has come with a ticket; changes are of its attributes."""
    each = request(tokens, ticket() if params is None else params, name=changes.pop("name", "r"))
    vars(each).update(changes)
    made.on_new_request(each)
    return each


def allocate(made: Consumer, *requests: Any) -> None:
    """Blocks for requests of which nothing is cached here."""
    for one in requests:
        made.blocks_allocated(one, blocks(21, 22, 23), 40)


def keyed(key: bytes) -> dict[str, Any]:
    """A ticket of an engine with a key."""
    return ticket(serving=replace(SERVING, key=key))


def answered(
    prompt: int = 32, generated: int = 9, computed: int | None = None, **settings: Any
) -> Any:
    """A request that was prefilled elsewhere and has generated tokens; the last has no KV."""
    computed = prompt + generated - 1 if computed is None else computed
    params = settings.pop("params", {"do_remote_prefill": True})
    return spoken(request(prompt, dict(params), computed=computed, **settings), generated)


def spoken(each: Any, generated: int = 0) -> Any:
    """A request with ``all_token_ids``, of which some were generated."""
    last = each.prompt_token_ids[-1]
    each.all_token_ids = [*each._all_token_ids, *(last + 1 + i for i in range(generated))]
    each.num_tokens = len(each.all_token_ids)
    return each


def host_pages(count: int, clock: Callable[[], float]) -> HostPages:
    """So many host pages, from 1 on; requests wait for them for 10 seconds."""
    return HostPages(range(1, count + 1), patience=10.0, clock=clock)


class Spans:
    """Records what ``RequestSpans`` is asked for."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Any, dict[str, Any]]] = []

    def loaded(self, headers: Any, record: LoadRecord, **attributes: Any) -> None:
        self.made.append(("load", headers, attributes))

    def failed(self, headers: Any, begun: float, **attributes: Any) -> None:
        self.made.append(("failed", headers, attributes))

    def held(self, headers: Any, seconds: float, **attributes: Any) -> None:
        self.made.append(("hold", headers, attributes | {"seconds": round(seconds, 3)}))


def _not_known(request: Any) -> bytes | None:
    raise AdapterError("not known")


NOT_KNOWN: dict[str, Any] = {"adapter_content": _not_known}
"""An engine that knows the content of no adapter."""
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
RECORD = LoadRecord(
    request="d",
    engine="prefill",
    reads=True,
    tokens=40,
    copies=3,
    nbytes=4 << 20,
    seconds=0.0204,
    wait_seconds=0.0002,
    handshake_seconds=0.003,
    check_seconds=0.0053,
)
SIGNS = {"security": SecuritySettings(secrets=SECRETS)}
KEYS = {"security": SecuritySettings(access=KEYED)}


def engine(role: str = "kv_both", **changes: Any) -> Any:
    """A ``VllmConfig``, as far as it is looked at; a change names a setting of any part of it."""
    parts: dict[str, dict[str, object]] = {
        "model_config": {
            "model": "tiny",
            "enable_sleep_mode": False,
            "runner_type": "generate",
            "multimodal_config": None,
        },
        "cache_config": {"enable_prefix_caching": False, "mamba_cache_mode": "align"},
        "attention_config": {"hisparse_config": None},
        "aux_output_config": {"enabled": False},
        "kv_transfer_config": {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": None,
            "engine_id": "decode",
            "kv_role": role,
            "is_kv_consumer": role != "kv_producer",
            "is_kv_producer": role != "kv_consumer",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {},
        },
        "device_config": {"device_type": "cpu"},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_index": 0,
            "data_parallel_size_local": 1,
            "data_parallel_backend": "mp",
            "distributed_executor_backend": "mp",
            "node_rank_within_dp": 0,
        },
        "observability_config": {"otlp_traces_endpoint": None},
    }
    for settings in parts.values():
        settings.update({name: changes.pop(name) for name in list(changes) if name in settings})
    built = {name: SimpleNamespace(**settings) for name, settings in parts.items()}
    others = {
        "scheduler_config": SimpleNamespace(get_scheduler_cls=object),
        "lora_config": None,
        "speculative_config": None,
        "num_prefill_lookahead_tokens": 0,
    }
    return SimpleNamespace(**{**others, **built, **changes})
