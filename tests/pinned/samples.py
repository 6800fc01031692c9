"""Samples of all messages, tickets and addresses, made from fixed values.

Each sample is built by the constructors of its classes, so renaming a class changes an import here
and nothing else. The bytes that belong to it are in ``bytes.txt``.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvferry.core import messages as wire
from kvferry.core import side_channel_messages as side
from kvferry.core.errors import TicketError
from kvferry.core.layout import ContextParallel, Group, GroupKind, Layout, axis
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.prompt_digest import BlockDigests, chain
from kvferry.core.lifecycle.ticket import Ticket, TicketFields
from kvferry.core.memory import Region, region_of
from kvferry.core.security import TicketKey, TicketSecrets
from kvferry.core.security.ticket_proof import check as check_proof
from kvferry.core.security.ticket_proof import fingerprint
from kvferry.core.slot_words import SlotTable
from kvferry.core.transport.addresses import digest_of
from kvferry.drivers.loopback import address as loopback
from kvferry.drivers.loopback.address import RegionRegistry, expected_rows
from kvferry.drivers.loopback.notifications import ChannelHello
from kvferry.drivers.nixl import address as nixl
from kvferry.drivers.nixl.agents import RegisteredSpan
from kvferry.drivers.ucx import address as ucx
from kvferry.drivers.ucx import messages
from kvferry.drivers.ucx.address import KeyId, ProcessIdentity
from kvferry.drivers.ucx.messages import build_rows, check_rows
from kvferry.integrations.vllm.prompts import prompt_digest
from kvferry.integrations.vllm.ticket_format import (
    Part,
    TicketParams,
    read_part,
    read_ticket,
)
from tests.core.layouts import STATE, paged, plain_field

INCARNATION = 0x0123456789ABCDEF
LARGEST = (1 << 63) - 1
INSTANCE = bytes(range(16))
LINE = bytes(range(16, 32))
SECRETS = TicketSecrets.of(["the secret of both engines"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One message.

    Attributes:
        make: gives its bytes.
        read: what a receiver makes of them.
        found: what ``read`` must give.
        objects: the messages in it, by which it is known which classes and fields are pinned.
    """

    make: Callable[[], bytes]
    read: Callable[[bytes], object]
    found: object
    objects: Sequence[object] = ()


def _message(
    message: Any, encode: Callable[[Any], bytes], read: Callable[[bytes], object]
) -> Sample:
    """Return the sample of a message that decodes to an equal one."""
    return Sample(make=lambda: encode(message), read=read, found=message, objects=[message])


def _ticket_key() -> TicketKey:
    """Return a fixed ticket key."""
    private = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    with mock.patch.object(Ed25519PrivateKey, "generate", return_value=private):
        return TicketKey()


TICKET_KEY = _ticket_key()

# Layouts and payloads.

ATTENTION = Layout(
    regions=(
        Region(address=0x7F00_0000_1000, nbytes=1 << 14),
        Region(address=0x7E00_0000_0000, nbytes=384, kind="cuda", device=1),
    ),
    groups=(
        paged(16, ContextParallel(size=2, rank=1, interleave=4)),
        paged(32),
    ),
    fields=(
        *(
            plain_field(
                f"model.layers.0.attn/{name}",
                offset=1024 * index,
                page_stride=2048,
                pages=8,
                dtype="float16",
                unit=16,
                tokens=axis((16, 16)),
                shard=axis((4, 256)),
                shard_range=(4, 8),
            )
            for index, name in enumerate("kv")
        ),
        plain_field(
            "draft_model.layers.0.attn/kv",
            group=1,
            region=1,
            page_stride=96,
            pages=4,
            dtype="uint8",
            unit=6,
            tokens=axis((2, 48), (4, 12)),
            inner=(axis((2, 6)),),
            tokens_per_state=4,
            draft=True,
            encoding="fp8_e4m3, scales k 0.5, v 0.25",
        ),
    ),
)
"""Attention under context parallelism, and a compressed, quantised cache of a draft layer."""

STATES = Layout(
    regions=(Region(address=1 << 20, nbytes=448),),
    groups=(STATE,),
    fields=(
        plain_field(
            "model.layers.1.mixer/conv x",
            page_stride=112,
            pages=4,
            dtype="float32",
            unit=12,
            shard=axis((4, 12)),
            shard_range=(0, 4),
        ),
        plain_field(
            "model.layers.1.mixer/ssm",
            offset=48,
            page_stride=112,
            pages=4,
            dtype="bfloat16",
            unit=16,
            shard=axis((4, 16)),
            shard_range=(0, 4),
        ),
    ),
)

OPAQUE = Layout(
    regions=(Region(address=1 << 20, nbytes=3072),),
    groups=(Group(kind=GroupKind.OPAQUE, block_tokens=16),),
    fields=(
        plain_field(
            "model.layers.0.attn/page",
            page_stride=1024,
            pages=3,
            dtype="bfloat16",
            unit=1000,
            packing="SOME_ATTN bfloat16 1x2x16x32/1024x64x2 cpu",
        ),
    ),
)

EMPTY = Layout(regions=(), groups=(), fields=())


def _payload(layout: Layout, **more: Any) -> wire.RankPayload:
    given: dict[str, Any] = {
        "oldest": 1,
        "newest": 1,
        "engine": "prefill",
        "incarnation": INCARNATION,
        "rank": 0,
        "coordinates": wire.Coordinates(),
        "agreement": {},
        "driver": "loopback",
        "address": b"\x00its own\xff",
        "slots": Region(address=1 << 21, nbytes=4096),
        "lease": 30.0,
        "fingerprint": Region(address=(1 << 21) - 16, nbytes=16),
        "watermarks": Region(address=(1 << 21) + 4096, nbytes=4096),
    }
    return wire.RankPayload(layout=layout, **(given | more))


FULL_PAYLOAD = _payload(
    ATTENTION,
    oldest=1,
    newest=3,
    engine="\u00e4ngine-0",
    rank=3,
    coordinates=wire.Coordinates(pp=1, tp=2, pcp=3, dcp=4),
    agreement={"model": "tiny", "rotary embedding": '{"rope_theta": 10000.0}'},
)

PAYLOADS = {
    "payload, attention": FULL_PAYLOAD,
    "payload, states": _payload(STATES),
    "payload, without heartbeats": _payload(EMPTY, heartbeats=False),
    "payload, opaque pages": _payload(OPAQUE),
}

# Requests, replies and notes.

REQUESTS: dict[str, side.Request] = {
    "request, ask": side.PayloadRequest(oldest=1, newest=1, engine="prefill"),
    "request, ping": side.Ping(engine="prefill"),
    "request, follow": side.Follow(
        engine="prefill", rooms=[(bytes(range(16)), 0), (bytes(16), 1 << 40)], wait_ms=200
    ),
    "request, follow with prompts": side.Follow(
        engine="prefill",
        rooms=[(bytes(range(16)), 0), (bytes(16), 7)],
        wait_ms=200,
        prompts=[b"a prompt digest.", b""],
    ),
    "request, follow at once": side.Follow(engine="prefill", rooms=[(bytes(16), 0)]),
    "request, health": side.Health(),
    "request, health of one engine": side.Health(engine="prefill"),
    "request, revoke": side.Revoke(),
    "request, revoke conversations": side.Revoke(engine="decode", conversations=True),
}

REPLIES: dict[str, side.Reply] = {
    "reply, payloads": side.Payloads(ranks=[b"rank 0", b"rank 1" * 50]),
    "reply, payloads with a key": side.Payloads(ranks=[b"rank 0"], ticket_key=TICKET_KEY.public),
    "reply, followed": side.Followed(
        incarnation=INCARNATION,
        rooms=[
            side.RoomNews(room=bytes(16), version=1),
            side.RoomNews(room=bytes(range(16)), version=2, part=b"a part"),
            side.RoomNews(room=b"x" * 16, version=3, part=b"a ticket", is_last=True),
            side.RoomNews(room=b"y" * 16, version=1 << 40, is_last=True, error="aborted"),
        ],
    ),
    "reply, followed with prompts": side.Followed(
        incarnation=INCARNATION,
        rooms=[
            side.RoomNews(room=bytes(16), version=2, part=b"a part", prompt=b"a prompt digest.")
        ],
    ),
    "reply, pong": side.Pong(incarnation=INCARNATION),
    "reply, condition": side.Condition(engine="prefill", incarnation=INCARNATION),
    "reply, condition with problems": side.Condition(
        engine="prefill", incarnation=INCARNATION, problems=["the endpoint is closed", "another"]
    ),
    "reply, revoked": side.Revoked(engine="prefill", incarnation=INCARNATION, tickets=3),
    "reply, refusal": side.Refusal(reason="there is no engine 'decode' here"),
}

DONE = wire.Release(
    incarnation=INCARNATION, slot=3, generation=LARGEST, engine="decode", rank=1, expected=4
)
ABANDONED = wire.Release(
    incarnation=1,
    slot=(1 << 32) - 1,
    generation=7,
    engine="decode",
    rank=0,
    expected=1,
    abandoned=True,
)
RENEWAL = wire.Renewal(incarnation=1, slot=4, generation=7, engine="decode", life=LARGEST)
HEARTBEAT = wire.Heartbeat(incarnation=1, engine="decode", life=LARGEST)

NOTES: dict[str, list[wire.Note]] = {
    "note, done": [DONE],
    "note, abandoned": [ABANDONED],
    "note, renewal": [RENEWAL],
    "note, heartbeat": [HEARTBEAT],
    "note, several": [DONE, RENEWAL, ABANDONED, HEARTBEAT],
}


def _notes(notes: list[wire.Note]) -> Sample:
    return Sample(
        make=lambda: side.encode(notes), read=wire.decode_notes, found=notes, objects=notes
    )


# Tickets.

OFFER = TicketParams(
    engine="prefill",
    incarnation=INCARNATION,
    request="r-1",
    host="10.0.0.1",
    port=5600,
    hold=Hold(slot=7, generation=LARGEST - 1),
    pages=((5, 4, 9),),
    first_index=(2,),
    tokens=40,
    digest=bytes(range(100, 116)),
    computed=False,
)
LARGE_OFFER = replace(
    OFFER,
    request="cmpl-\u00fc",
    tokens=1 << 20,
    computed=True,
    key=bytes(range(32, 64)),
    pages=((0, 0, 4, 7), (), (1 << 39,)),
    first_index=(0, 0, 1 << 16),
    tp_size=8,
    pp_size=2,
    dcp_size=4,
)


def _ticket_of(offer: TicketParams) -> Ticket:
    """Return what a reader gets of an offer, without the proof."""
    common = {each.name: getattr(offer, each.name) for each in fields(TicketFields)}
    return Ticket(**common)


CHAIN = BlockDigests(
    tokens=16, salt=bytes(range(16)), digests=chain(range(40), 16, bytes(range(16)), None, {1: [2]})
)


def _ticket(offer: TicketParams, *, signed: bool, proved: bool) -> Sample:
    """Return the sample of ``kv_transfer_params``, as JSON."""
    secrets, key = SECRETS if signed else None, TICKET_KEY if proved else None

    def made() -> bytes:
        return json.dumps(offer.params(secrets, key)).encode()

    def found(data: bytes) -> object:
        got = read_ticket(json.loads(data), secrets)
        check_proof(got.proof, TICKET_KEY.public if proved else b"")
        return replace(got, proof=None)

    return Sample(make=made, read=found, found=_ticket_of(offer), objects=[offer])


def _part(offer: TicketParams) -> Sample:
    """Return the sample of a part of a ticket, signed and proven, as a room has it."""

    def found(data: bytes) -> object:
        got = read_part(data, SECRETS, is_last=False)
        check_proof(got.ticket.proof, TICKET_KEY.public)
        return replace(got, ticket=replace(got.ticket, proof=None))

    return Sample(
        make=lambda: msgspec.json.encode(offer.params(SECRETS, TICKET_KEY)),
        read=found,
        found=Part(ticket=_ticket_of(offer), total=offer.total, is_last=False),
        objects=[offer],
    )


def _refused_ticket(offer: TicketParams) -> Sample:
    """Return the sample of a ticket without proof and signature, which is refused."""

    def found(data: bytes) -> object:
        try:
            return read_ticket(json.loads(data))
        except TicketError as exc:
            return exc.reason.value

    return Sample(
        make=lambda: json.dumps(offer.params()).encode(),
        read=found,
        found="proof",
        objects=[offer],
    )


def _digest(request: SimpleNamespace) -> Sample:
    """Return the sample of a prompt's digest."""
    return Sample(make=lambda: prompt_digest(request, 30), read=len, found=16)


def _request(**changes: object) -> Any:
    """Return the attributes of vLLM's ``Request`` that a digest depends on."""
    plain = {
        "prompt_token_ids": list(range(40)),
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
    }
    return SimpleNamespace(**(plain | changes))


def _image(offset: int) -> SimpleNamespace:
    return SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=offset, length=2))


TICKETS = {
    "ticket, with nothing": _refused_ticket(OFFER),
    "ticket, signed": _ticket(OFFER, signed=True, proved=False),
    "ticket, signed and proved": _ticket(OFFER, signed=True, proved=True),
    "ticket of a conversation": _ticket(replace(OFFER, blocks=CHAIN), signed=True, proved=True),
    "ticket of an engine that has loaded": _ticket(
        replace(OFFER, missing=(3,)), signed=False, proved=True
    ),
    "ticket of an engine that names its weights": _ticket(
        replace(OFFER, weights="v2"), signed=False, proved=True
    ),
    "ticket, large, signed and proved": _ticket(LARGE_OFFER, signed=True, proved=True),
    "part of a ticket": _part(replace(OFFER, total=100)),
    "digest of token ids": _digest(_request()),
    "digest of all but embeddings": _digest(
        _request(
            lora_request=SimpleNamespace(lora_name="lora"),
            mm_features=[_image(3), _image(29), _image(30)],
            cache_salt="salt \ud800",
            prompt_is_token_ids=[True, False] * 20,
        )
    ),
}

# Memory that peers read.

HOLD = Hold(slot=1, generation=5)
LAST_HOLD = Hold(slot=2, generation=LARGEST)


def _slot_table() -> bytes:
    """Return the memory of a slot table, with the fingerprint in front of it."""
    table = SlotTable(3)
    table.write_fingerprint(fingerprint(TICKET_KEY.public))
    table.words[HOLD.slot], table.words[LAST_HOLD.slot] = HOLD.computing, LAST_HOLD.ready
    header, words = region_of(table.header), region_of(table.words)
    return ctypes.string_at(header.address, words.end - header.address)


def _words(data: bytes) -> object:
    words = np.frombuffer(data, "<u8")[2:].tolist()
    return data[:16] == fingerprint(TICKET_KEY.public), [
        (hold.stands(word), word == hold.ready)
        for hold, word in zip((HOLD, LAST_HOLD), words[1:], strict=True)
    ]


BOARD_REGIONS = [Region(address=4096, nbytes=1 << 20), Region(address=1 << 40, nbytes=24)]
RENEWALS = expected_rows(
    INSTANCE,
    [
        loopback.LoopbackRegion(region.address, region.nbytes, region.device, slot, slot + 1)
        for slot, region in enumerate(BOARD_REGIONS)
    ],
)


def _region_registry() -> bytes:
    """Return the memory of the region registry of the driver loopback."""
    board = RegionRegistry(instance=INSTANCE)
    try:
        for region in BOARD_REGIONS:
            board.add(region)
        return ctypes.string_at(board.address, len(RENEWALS.expected))
    finally:
        board.close()


def _checked_region_registry(data: bytes) -> object:
    RENEWALS.check(data, "a peer")
    return None  # anything else raises


MEMORY = {
    "memory, slot table": Sample(
        make=_slot_table, read=_words, found=(True, [(True, False), (True, True)])
    ),
    "memory, loopback's regions": Sample(
        make=_region_registry, read=_checked_region_registry, found=None
    ),
}

# Drivers.

LOOPBACK = loopback.LoopbackAddress(
    name="loopback-77-0011223344556677",
    boot="7a6de0c8-2b5c-4f0e-9a51-6f3b0c1d2e3f",
    pid_namespace=4026531836,
    pid=77,
    start_time=123456789,
    instance=INSTANCE,
    socket="kvferry-00112233445566778899aabbccddeeff",
    board=0x7F00_0000_0000,
    regions=[
        loopback.LoopbackRegion(4096, 1 << 20, 0, 0, 1),
        loopback.LoopbackRegion(1 << 40, 24, 3, 1, 2),
    ],
)
HELLO = ChannelHello(to=INSTANCE, sender="loopback-77-0011223344556677")

NIXL_SPAN = RegisteredSpan(whole=Region(address=4096, nbytes=1 << 20), key=7)
NIXL_REGIONS = [
    Region(address=4096, nbytes=1 << 20),
    Region(address=8192, nbytes=16, kind="cuda", device=2),
]


def _nixl() -> bytes:
    return nixl.encode(
        name="nixl-77-0011223344556677",
        backend="UCX",
        metadata=b"nixlSerDes|its own",
        spans=[NIXL_SPAN],
        regions=NIXL_REGIONS,
    )


NIXL = nixl.NixlAddress(
    name="nixl-77-0011223344556677",
    backend="UCX",
    metadata=b"nixlSerDes|its own",
    digest=digest_of(b"nixlSerDes|its own"),
    spans=[nixl.Range(4096, 1 << 20, "cpu", 0, 7)],
    regions=[nixl.Range(4096, 1 << 20, "cpu", 0), nixl.Range(8192, 16, "cuda", 2)],
)

UCX = ucx.UcxAddress(
    name="ucx-77-0011223344556677",
    instance=INSTANCE,
    process=ProcessIdentity("7a6de0c8-2b5c-4f0e-9a51-6f3b0c1d2e3f", 4026531836, 77, 123456789),
    ucx="1.22.0",
    worker=b"UCX's own",
    withdrawn=3,
    regions=[
        ucx.UcxRegion(4096, 1 << 20, "cpu", 0, 7, b"a key"),
        ucx.UcxRegion(1 << 40, 24, "cuda", 2, 8, b"another"),
    ],
)


def _ucx(data: bytes) -> object:
    """Decode an address without the two hashes that decoding has checked."""
    found = ucx.decode(data)
    if not (found.digest and found.full_digest):
        return "without hashes"
    return ucx.UcxAddress(
        name=found.name,
        instance=found.instance,
        process=found.process,
        ucx=found.ucx,
        worker=found.worker,
        withdrawn=found.withdrawn,
        regions=found.regions,
    )


UCX_MESSAGES: dict[str, messages.Message] = {
    "hello": messages.Hello(LINE, INSTANCE, "ucx-77-0011223344556677", b"UCX's own", 3, 1),
    "welcome": messages.Welcome(LINE, [7, 1 << 40]),
    "refused": messages.Refused(LINE, "the address is too old"),
    "note": messages.Note(LINE, b"\x00a notification\xff"),
    "withdrawn": messages.Withdrawn(LINE, 4, 7),
    "released": messages.Released(LINE, 4),
    "bye": messages.Bye(LINE),
    "fetch": messages.Fetch(LINE, 6, bytes(range(48))),
    "fetched": messages.Fetched(LINE, 6, "a region has been deregistered"),
}


def _rows() -> bytes:
    """Return the rows that name memory in the body of a store, or in a fetch."""
    columns = ([7, 8], [8192, 1 << 40], [16, 24])
    keys, addresses, nbytes = (np.array(column, np.uint64) for column in columns)
    return build_rows(keys, addresses, nbytes).tobytes()


def _checked_rows(data: bytes) -> object:
    regions = {
        KeyId(7): Region(address=4096, nbytes=1 << 20),
        KeyId(8): Region(address=1 << 40, nbytes=24),
    }
    refusal, addresses, nbytes = check_rows(data, regions)
    return refusal, addresses.tolist(), nbytes.tolist()


def _packed_hello(hello: ChannelHello) -> bytes:
    return msgspec.msgpack.encode(hello)


def _read_hello(data: bytes) -> object:
    return msgspec.msgpack.decode(data, type=ChannelHello)


DRIVERS = {
    "loopback, address": _message(LOOPBACK, loopback.encode, loopback.decode),
    "loopback, hello": _message(HELLO, _packed_hello, _read_hello),
    "nixl, address": Sample(make=_nixl, read=nixl.decode, found=NIXL, objects=[NIXL]),
    "ucx, address": Sample(make=lambda: ucx.encode(UCX), read=_ucx, found=UCX, objects=[UCX]),
    "ucx, rows of a store and of a fetch": Sample(
        make=_rows, read=_checked_rows, found=("", [8192, 1 << 40], [16, 24])
    ),
    **{
        f"ucx, {name}": _message(message, messages.encode, messages.decode)
        for name, message in UCX_MESSAGES.items()
    },
}

SAMPLES: dict[str, Sample] = {
    **{
        name: _message(message, side.encode, side.decode_request)
        for name, message in REQUESTS.items()
    },
    **{
        name: _message(message, side.encode, side.decode_reply) for name, message in REPLIES.items()
    },
    **{
        name: _message(message, side.encode, wire.decode_payload)
        for name, message in PAYLOADS.items()
    },
    **{name: _notes(notes) for name, notes in NOTES.items()},
    **TICKETS,
    **MEMORY,
    **DRIVERS,
}
