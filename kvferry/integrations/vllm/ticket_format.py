"""The ticket as vLLM's ``kv_transfer_params``: NixlConnector's keys, and one more, ``kvferry``.

Routers pass the dictionary through, some as JSON, so numbers beyond 53 bits travel as hexadecimal
text. What comes back is input from a client, and is validated before anything uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from kvferry.core.errors import TicketError, TicketReason
from kvferry.core.layout import MAX_GROUPS
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.prompt_digest import DIGEST_BYTES, MAX_BLOCK_DIGESTS, BlockDigests
from kvferry.core.lifecycle.ticket import MAX_TEXT, MAX_TOKENS, PeerKey, Ticket, TicketFields
from kvferry.core.security import KEY_BYTES, Proof, TicketKey, TicketSecrets
from kvferry.core.security.ticket_proof import content_of
from kvferry.core.side_channel_messages import DECODE_ERRORS

VERSION = 1
MAX_TRANSFER_ID = 1024
"""The most characters of a ``transfer_id``."""
KEY = "kvferry"
"""The key for everything that NixlConnector's keys cannot express."""

Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=512)]
Digests = Annotated[
    str,
    Meta(pattern="^([0-9a-f]{2})*$", max_length=2 * DIGEST_BYTES * MAX_BLOCK_DIGESTS),
]
Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Numbers = Annotated[list[Integer], Meta(max_length=MAX_GROUPS)]


class _BlockDigests(Struct, frozen=True, kw_only=True):
    """The value of ``blocks`` under ``kvferry``; ``BlockDigests`` explains the attributes."""

    tokens: Integer
    salt: Hex
    digests: Digests


class _FerryParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of the key ``kvferry``; ``TicketFields`` and ``Proof`` explain most attributes.

    ``host`` and ``port`` are the side channel's address as the producer itself states it; routers
    do not change them. Tickets without a proof lack them.
    """

    version: Integer
    incarnation: Hex
    slot: Integer
    generation: Hex
    digest: Hex
    tokens: Integer
    computed: bool
    first_index: Numbers
    key: Hex = ""
    blocks: _BlockDigests | None = None
    missing: Numbers = []
    weights: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    part: bool = False
    total: Integer = 0
    host: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    port: Integer = 0
    ticket_key: Hex = ""
    proof: Hex = ""
    signature: Hex = ""


class _NixlParams(Struct, frozen=True, kw_only=True):
    """The keys of NixlConnector that kvferry reads; kvferry ignores all others."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: Integer
    remote_block_ids: Annotated[list[list[Integer]], Meta(max_length=MAX_GROUPS)]
    tp_size: Integer


class _RoomParams(Struct, frozen=True, kw_only=True):
    """The keys of MooncakeConnector with which a router names a room, and a public key."""

    transfer_id: Annotated[str, Meta(min_length=1, max_length=MAX_TRANSFER_ID)]
    remote_engine_id: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT)]
    remote_bootstrap_addr: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT + 16)]
    remote_bootstrap_key: Hex = ""


SIGNATURE = "signature"
PROOF = "proof"
ROUTED = ("remote_host", "remote_port")
"""The keys that routers rewrite where engines and their clients are in different networks."""

S = TypeVar("S", bound=Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketParams(TicketFields):
    """A producer's ticket for one request; or a part of it, which has the ``total`` of the ticket.

    It validates nothing: before the side channel is open the port is 0, which every reader refuses.
    """

    pp_size: int = 1
    dcp_size: int = 1
    total: int = 0

    def params(
        self, secrets: TicketSecrets | None = None, ticket_key: TicketKey | None = None
    ) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` with which a router asks another engine to decode.

        Those of a conversation's ticket, which has ``blocks``, ask for the next turn's prefill.
        They are signed with ``secrets``, and proven with ``ticket_key``, if there are any.
        """
        is_proven, blocks = ticket_key is not None, self.blocks
        own = _FerryParams(
            version=VERSION,
            incarnation=f"{self.incarnation:016x}",
            slot=self.hold.slot,
            generation=f"{self.hold.generation:016x}",
            digest=self.digest.hex(),
            tokens=self.tokens,
            computed=self.computed,
            first_index=list(self.first_index),
            key=self.key.hex(),
            blocks=None
            if blocks is None
            else _BlockDigests(
                tokens=blocks.tokens, salt=blocks.salt.hex(), digests=blocks.digests.hex()
            ),
            missing=list(self.missing) if any(self.missing) else [],
            weights=self.weights,
            part=bool(self.total),
            total=self.total,
            host=self.host if is_proven else "",
            port=self.port if is_proven else 0,
            ticket_key=ticket_key.public.hex() if ticket_key is not None else "",
        )
        params = {
            "do_remote_prefill": blocks is None,
            "do_remote_decode": blocks is not None,
            "remote_block_ids": [list(ids) for ids in self.pages],
            "remote_engine_id": self.engine,
            "remote_request_id": self.request,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp_size,
            "dcp_size": self.dcp_size,
            "pp_size": self.pp_size,
            "remote_num_tokens": self.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            KEY: msgspec.to_builtins(own),
        }
        if ticket_key is not None:
            params[KEY][PROOF] = ticket_key.sign(_content(params, proven=True)).hex()
        if secrets is not None:
            params[KEY][SIGNATURE] = secrets.sign(_content(params, proven=False)).hex()
        return params


def read_ticket(
    params: Mapping[str, Any], secrets: TicketSecrets | None = None, *, prompt: int = MAX_TOKENS
) -> Ticket:
    """Return the ticket in a decode request's ``kv_transfer_params``, which a client sent.

    One of ``secrets`` must have signed it; without secrets it must not be signed. The ``prompt``'s
    tokens bound how many pages a client can make this engine check. A proof can be verified only
    after the handshake (``core.lifecycle.ticket.check_against``).

    Raises:
        TicketError: The ticket is another connector's or version's, or a part; it is malformed or
            lists more pages than the prompt has tokens; its signature is missing, wrong or not
            expected; or it has neither signature nor proof.
    """
    ferry, ticket = _read(params, secrets, prompt)
    if ferry.part:
        raise TicketError(
            f"it is a part of a ticket, for {ferry.tokens} of {ferry.total} tokens; parts come by "
            "the side channel only: let the router pass on what prefill answers"
        )
    return ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a producer says in a room: how much of a prompt is computed, and in which pages.

    ``ticket`` is the ticket if ``is_last``; or one that covers the tokens that are computed, with
    the pages of full attention only. ``total`` is how many tokens the ticket covers, or will cover.
    """

    ticket: Ticket
    total: int
    is_last: bool


def read_part(
    data: bytes,
    secrets: TicketSecrets | None = None,
    *,
    is_last: bool,
    prompt: int = MAX_TOKENS,
) -> Part:
    """Return what a producer has published in a room; raise as ``read_ticket``."""
    try:
        params = msgspec.json.decode(data, type=dict[str, Any])
    except DECODE_ERRORS as exc:
        raise TicketError(f"a part of the ticket: {exc}") from exc
    if is_last:
        ticket = read_ticket(params, secrets, prompt=prompt)
        return Part(ticket=ticket, total=ticket.tokens, is_last=True)
    ferry, ticket = _read(params, secrets, prompt)
    if not ferry.part or not ticket.tokens < ferry.total <= MAX_TOKENS:
        raise TicketError(
            f"a part of the ticket covers {ticket.tokens} tokens, and the ticket {ferry.total}"
        )
    return Part(ticket=ticket, total=ferry.total, is_last=False)


def _read(
    params: Mapping[str, Any], secrets: TicketSecrets | None, prompt: int
) -> tuple[_FerryParams, Ticket]:
    """Return the ticket or part in ``kv_transfer_params``; ``read_ticket`` explains the rest."""
    if KEY not in params:
        raise TicketError(
            f"the ticket has no {KEY!r} key, so another connector made it: let both engines use "
            "KVFerryConnector, and the router pass kv_transfer_params on whole",
            reason=TicketReason.FOREIGN,
        )
    ferry = _convert(params[KEY], _FerryParams, f"kv_transfer_params[{KEY!r}]")
    if ferry.version != VERSION:
        raise TicketError(
            f"the ticket has version {ferry.version}; this engine reads {VERSION}",
            reason=TicketReason.VERSION,
        )
    _check_lengths(params.get("remote_block_ids"), prompt)
    nixl = _convert(dict(params), _NixlParams, "kv_transfer_params")
    signature, proof = bytes.fromhex(ferry.signature), None
    if secrets is not None:
        secrets.check(_content(params, proven=False), signature)
    elif signature:
        raise TicketError(
            "the ticket is signed, and this engine has no ticket_secrets to check it with: give it "
            "those of the ticket's engine",
            reason=TicketReason.SIGNATURE,
        )
    if ferry.ticket_key or ferry.proof:
        proof = Proof(
            key=bytes.fromhex(ferry.ticket_key),
            content=content_of(_content(params, proven=True)),
            signature=bytes.fromhex(ferry.proof),
        )
    elif secrets is None:
        # Otherwise any listener could pass for an engine of an older build and, with tickets of
        # its own, have any page of an honest engine read.
        raise TicketError(
            "the ticket has neither a proof nor a signature: upgrade the kvferry of its engine, "
            "or give both engines ticket_secrets",
            reason=TicketReason.PROOF,
        )
    blocks, routed = ferry.blocks, None
    host, port = given = nixl.remote_host, nixl.remote_port
    if ferry.host:  # as the producer wrote it; what the router says is tried if it is not signed
        host, port = ferry.host, ferry.port
        routed = given if secrets is None and given != (host, port) else None
    return ferry, Ticket(
        engine=nixl.remote_engine_id,
        incarnation=_number(ferry.incarnation),
        request=nixl.remote_request_id[:MAX_TEXT],  # vLLM's users choose it
        host=host,
        port=port,
        hold=Hold(slot=ferry.slot, generation=_number(ferry.generation)),
        pages=tuple(map(tuple, nixl.remote_block_ids)),
        first_index=tuple(ferry.first_index),
        tokens=ferry.tokens,
        digest=bytes.fromhex(ferry.digest),
        computed=ferry.computed,
        tp_size=nixl.tp_size,
        key=bytes.fromhex(ferry.key),
        routed=routed,
        proof=proof,
        blocks=None
        if blocks is None
        else BlockDigests(
            tokens=blocks.tokens,
            salt=bytes.fromhex(blocks.salt),
            digests=bytes.fromhex(blocks.digests),
        ),
        missing=tuple(ferry.missing),
        weights=ferry.weights,
    )


def names_room(params: Mapping[str, Any]) -> bool:
    """Return whether params ask to decode what is not computed yet: a room, and no ticket."""
    has_ticket = KEY in params or params.get("remote_block_ids")
    return bool(params.get("transfer_id")) and not has_ticket


def room_name(params: Mapping[str, Any]) -> str | None:
    """Return the router's name of a request's room, ``None`` without one that can be followed."""
    name = params.get("transfer_id")
    return name if isinstance(name, str) and 1 <= len(name) <= MAX_TRANSFER_ID else None


def read_room(params: Mapping[str, Any]) -> tuple[str, PeerKey]:
    """Return the router's name of the room and the producer, or raise ``TicketError``."""
    room = _convert(dict(params), _RoomParams, "kv_transfer_params without a ticket")
    host, port = _address(room.remote_bootstrap_addr)
    key = bytes.fromhex(room.remote_bootstrap_key)
    if len(key) not in (0, KEY_BYTES):
        raise TicketError(f"remote_bootstrap_key has {len(key)} bytes; a key has {KEY_BYTES}")
    return room.transfer_id, PeerKey(room.remote_engine_id, host, port, key)


def _address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, with or without a scheme such as ``http://``."""
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise TicketError(
            f"remote_bootstrap_addr {text!r} is not HOST:PORT: let the router send the address of "
            "prefill's side channel (side_channel_host and side_channel_port)"
        )
    return host, port


def _check_lengths(lists: object, prompt: int) -> None:
    """Refuse ``remote_block_ids`` longer than the prompt, before anything looks at every page."""
    for ids in lists if isinstance(lists, list | tuple) else ():
        if isinstance(ids, list | tuple) and len(ids) > prompt:
            raise TicketError(
                f"the ticket lists {len(ids)} blocks for a prompt of {prompt} tokens",
                reason=TicketReason.PROMPT,
            )


def _content(params: Mapping[str, Any], *, proven: bool) -> dict[str, Any]:
    """Return the part of the params that a proof covers, or that a signature does.

    That is every key of ``_NixlParams`` and everything under ``kvferry``, also keys of newer
    versions; but not what routers may change: all other keys, and, if the producer's own address is
    under ``kvferry``, ``remote_host`` and ``remote_port``. A signature covers the proof, too.
    """
    content = {name: params[name] for name in _NixlParams.__struct_fields__}
    excluded = (SIGNATURE, PROOF) if proven else (SIGNATURE,)
    own = {name: value for name, value in params[KEY].items() if name not in excluded}
    if proven:
        content = {name: value for name, value in content.items() if name not in ROUTED}
    elif own.get("host"):
        content.update(zip(ROUTED, (own["host"], own.get("port")), strict=True))
    return {**content, KEY: own}


def _convert(value: object, struct: type[S], where: str) -> S:
    """Return a client's value as a ``Struct``, validated; ``where`` it is, for the error."""
    try:
        return msgspec.convert(value, struct)
    except DECODE_ERRORS as exc:
        raise TicketError(f"{where}: {exc}") from exc


def _number(text: str) -> int:
    """Return the number that a hexadecimal text stands for; 0 for an empty text."""
    return int(text, 16) if text else 0
