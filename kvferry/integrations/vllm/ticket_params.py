"""The ticket as vLLM's ``kv_transfer_params``: NixlConnector's keys, and one more, ``kvferry``.

Routers pass the dictionary through, some as JSON, so numbers beyond 53 bits travel as hexadecimal
text. What comes back is input from a client, and is validated before anything uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvferry.core.errors import TicketError, TicketReason
from kvferry.core.layout import MAX_GROUPS
from kvferry.core.lifecycle.digest import DIGEST_BYTES, MAX_BLOCK_DIGESTS, BlockDigests
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.ticket import MAX_TEXT, MAX_TOKENS, Ticket
from kvferry.core.security import Proof, TicketKey, TicketSecrets
from kvferry.core.security.proof import content_of
from kvferry.core.side_channel_messages import DECODE_ERRORS

VERSION = 1
KEY = "kvferry"
"""The key for everything that NixlConnector's keys cannot express."""

Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=512)]
Digests = Annotated[
    str,
    Meta(pattern="^([0-9a-f]{2})*$", max_length=2 * DIGEST_BYTES * MAX_BLOCK_DIGESTS),
]
Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _BlockDigests(Struct, frozen=True, kw_only=True):
    """The value of ``blocks`` under ``kvferry``; ``BlockDigests`` explains the attributes."""

    tokens: Integer
    salt: Hex
    digests: Digests


class _FerryParams(Struct, frozen=True, kw_only=True):
    """The value of the key ``kvferry``; ``Ticket`` and ``Proof`` explain most attributes.

    ``host`` and ``port`` are the side channel's address as the producer itself states it; routers
    do not change them. Tickets of older builds lack them.
    """

    version: Integer
    incarnation: Hex
    slot: Integer
    generation: Hex
    digest: Hex
    tokens: Integer
    computed: bool
    first_index: Annotated[list[Integer], Meta(max_length=MAX_GROUPS)]
    key: Hex = ""
    host: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    port: Integer = 0
    ticket_key: Hex = ""
    proof: Hex = ""
    signature: Hex = ""
    blocks: _BlockDigests | None = None


class _NixlParams(Struct, frozen=True, kw_only=True):
    """The keys of NixlConnector that kvferry reads; kvferry ignores all others."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: Integer
    remote_block_ids: Annotated[list[list[Integer]], Meta(max_length=MAX_GROUPS)]
    tp_size: Integer


SIGNATURE = "signature"
PROOF = "proof"
ROUTED = ("remote_host", "remote_port")
"""The keys that routers rewrite where engines and their clients are in different networks."""

S = TypeVar("S", bound=Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """An engine's parallelism, as NixlConnector's keys express it.

    Attributes:
        tp: Number of tensor-parallel ranks.
        pp: Number of pipeline-parallel ranks.
        dcp: Number of decode context-parallel ranks.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketParams:
    """A producer's ticket for one request; ``Ticket`` explains the attributes.

    Unlike ``Ticket``, this class validates nothing: an engine whose side channel is not open yet,
    as in a test of the scheduler alone, hands out params with port 0, which every reader refuses.
    """

    engine: str
    incarnation: int
    request: str
    host: str
    port: int
    hold: Hold
    pages: Sequence[Sequence[int]]
    first_index: Sequence[int]
    tokens: int
    digest: bytes
    computed: bool
    sizes: ParallelSizes
    key: bytes = b""
    blocks: BlockDigests | None = None

    def params(
        self, secrets: TicketSecrets | None = None, ticket_key: TicketKey | None = None
    ) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` with which a router asks another engine to decode.

        Those of a conversation's ticket, which has ``blocks``, ask for the next turn's prefill.

        Args:
            secrets: The secrets that sign the params; ``None`` leaves the params unsigned.
            ticket_key: The key that makes the proof; the handshake publishes its public half.
                ``None`` leaves out the proof.
        """
        params = self._unsigned()
        if ticket_key is not None:
            params[KEY] |= {
                "host": self.host,
                "port": self.port,
                "ticket_key": ticket_key.public.hex(),
            }
            params[KEY][PROOF] = ticket_key.sign(_proven_content(params)).hex()
        if secrets is not None:
            params[KEY][SIGNATURE] = secrets.sign(_signed_content(params)).hex()
        return params

    def _unsigned(self) -> dict[str, Any]:
        """Return the params without proof and signature."""
        return {
            "do_remote_prefill": self.blocks is None,
            "do_remote_decode": self.blocks is not None,
            "remote_block_ids": [list(ids) for ids in self.pages],
            "remote_engine_id": self.engine,
            "remote_request_id": self.request,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.sizes.tp,
            "dcp_size": self.sizes.dcp,
            "pp_size": self.sizes.pp,
            "remote_num_tokens": self.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            KEY: {
                "version": VERSION,
                "incarnation": f"{self.incarnation:016x}",
                "slot": self.hold.slot,
                "generation": f"{self.hold.generation:016x}",
                "digest": self.digest.hex(),
                "tokens": self.tokens,
                "computed": self.computed,
                "first_index": list(self.first_index),
                **({"key": self.key.hex()} if self.key else {}),
                **({"blocks": _digest_params(self.blocks)} if self.blocks is not None else {}),
            },
        }


def _digest_params(blocks: BlockDigests) -> dict[str, Any]:
    """Return the value of ``blocks`` under ``kvferry``."""
    return {
        "tokens": blocks.tokens,
        "salt": blocks.salt.hex(),
        "digests": blocks.digests.hex(),
    }


def read_ticket(
    params: Mapping[str, Any], secrets: TicketSecrets | None = None, *, prompt: int = MAX_TOKENS
) -> Ticket:
    """Return the ticket in a decode request's ``kv_transfer_params``.

    Args:
        params: The params, which came from a client and are not trusted.
        secrets: The ticket must be signed with one of these secrets; ``None`` if the ticket must
            not be signed.
        prompt: How many tokens the request's prompt has. A page covers at least one token, so this
            bounds how many pages a client can make this engine check.

    Raises:
        TicketError: The ticket is refused: another connector made it; its format has another
            version; it is malformed or lists more pages than the prompt has tokens; its signature
            is missing, wrong or not expected; or it has neither signature nor proof. A proof can be
            verified only after the handshake (``core.lifecycle.ticket.check_against``).
    """
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
    _check_signature(params, bytes.fromhex(ferry.signature), secrets)
    proof = _proof(ferry, params)
    if proof is None and secrets is None:
        # Otherwise any listener could pass for an engine of an older build and, with tickets of
        # its own, have any page of an honest engine read.
        raise TicketError(
            "the ticket has neither a proof nor a signature: upgrade the kvferry of its engine, "
            "or give both engines ticket_secrets",
            reason=TicketReason.PROOF,
        )
    host, port, routed = _addresses(ferry, nixl, signed=secrets is not None)
    return Ticket(
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
        blocks=_block_digests(ferry.blocks),
    )


def _block_digests(params: _BlockDigests | None) -> BlockDigests | None:
    """Return the digests in a conversation's ticket, or ``None`` if the ticket has none."""
    if params is None:
        return None
    return BlockDigests(
        tokens=params.tokens,
        salt=bytes.fromhex(params.salt),
        digests=bytes.fromhex(params.digests),
    )


def _addresses(
    ferry: _FerryParams, nixl: _NixlParams, *, signed: bool
) -> tuple[str, int, tuple[str, int] | None]:
    """Return the addresses at which to try the producer's side channel, in order.

    Args:
        ferry: Has the address that the producer states, unless an older build made the ticket.
        nixl: Has the address that routers may rewrite.
        signed: Whether the ticket is signed; then only the signed address is tried.

    Returns:
        Host and port to try first, and a host and port to try if nobody answers there, or ``None``.
    """
    routed = nixl.remote_host, nixl.remote_port
    if not ferry.host:
        return *routed, None
    published = ferry.host, ferry.port
    return *published, None if signed or routed == published else routed


def _proof(ferry: _FerryParams, params: Mapping[str, Any]) -> Proof | None:
    """Return the proof that a ticket carries, or ``None`` if it has none.

    Args:
        ferry: The value of the key ``kvferry``.
        params: All params, of which the proof covers a part.

    Raises:
        TicketError: Only a part of the proof is there.
    """
    if not ferry.ticket_key and not ferry.proof:
        return None
    return Proof(
        key=bytes.fromhex(ferry.ticket_key),
        content=content_of(_proven_content(params)),
        signature=bytes.fromhex(ferry.proof),
    )


def _check_lengths(lists: object, prompt: int) -> None:
    """Refuse page lists longer than the prompt, before anything looks at every page.

    Args:
        lists: The value of ``remote_block_ids``, of any type.
        prompt: How many tokens the request's prompt has.

    Raises:
        TicketError: One of the lists has more pages than the prompt has tokens.
    """
    for ids in lists if isinstance(lists, list | tuple) else ():
        if isinstance(ids, list | tuple) and len(ids) > prompt:
            raise TicketError(
                f"the ticket lists {len(ids)} blocks for a prompt of {prompt} tokens",
                reason=TicketReason.PROMPT,
            )


def _check_signature(
    params: Mapping[str, Any], signature: bytes, secrets: TicketSecrets | None
) -> None:
    """Refuse a ticket whose signature is missing, wrong or not expected.

    Args:
        params: All params.
        signature: The ticket's signature; empty if it has none.
        secrets: The ticket must be signed with one of these secrets; ``None`` if the ticket must
            not be signed.

    Raises:
        TicketError: The ticket is refused.
    """
    if secrets is not None:
        secrets.check(_signed_content(params), signature)
    elif signature:
        raise TicketError(
            "the ticket is signed, and this engine has no ticket_secrets to check it with: give it "
            "those of the ticket's engine",
            reason=TicketReason.SIGNATURE,
        )


def _signed_content(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the params that a signature covers.

    A signature covers every key of ``_NixlParams`` and everything under ``kvferry``, also keys of
    newer versions. A signature does not cover what routers may change: all other keys, such as
    ``do_remote_prefill``, and, if the producer's own address is under ``kvferry``,
    ``remote_host`` and ``remote_port``.
    """
    content = {name: params[name] for name in _NixlParams.__struct_fields__}
    own = {name: value for name, value in params[KEY].items() if name != SIGNATURE}
    if own.get("host"):
        content.update(zip(ROUTED, (own["host"], own.get("port")), strict=True))
    return {**content, KEY: own}


def _proven_content(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the params that a proof covers.

    A proof covers what a signature covers, except the proof itself and the address that routers may
    rewrite. The producer's own address is covered; it is under ``kvferry``.
    """
    content = {name: params[name] for name in _NixlParams.__struct_fields__ if name not in ROUTED}
    own = {name: params[KEY][name] for name in params[KEY] if name not in (SIGNATURE, PROOF)}
    return {**content, KEY: own}


def _convert(value: object, struct: type[S], where: str) -> S:
    """Return a value as a ``Struct``, validated.

    Args:
        value: The value, from a client.
        struct: The type to convert to.
        where: Where the value is in the params, for errors.

    Raises:
        TicketError: The value is not valid.
    """
    try:
        return msgspec.convert(value, struct)
    except DECODE_ERRORS as exc:
        raise TicketError(f"{where}: {exc}") from exc


def _number(text: str) -> int:
    """Return the number that a hexadecimal text stands for; 0 for an empty text."""
    return int(text, 16) if text else 0
