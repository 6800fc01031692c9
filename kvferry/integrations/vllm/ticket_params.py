"""The ticket as vLLM's ``kv_transfer_params``: NixlConnector's keys, and one more, ``kvferry``.

Routers pass the dictionary through, some as JSON, so numbers beyond 53 bits travel as hexadecimal
text, and whatever comes back is checked as what it is: something from a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvferry.core.errors import TicketError, TicketReason
from kvferry.core.layout import MAX_GROUPS
from kvferry.core.lifecycle.holds import Hold
from kvferry.core.lifecycle.ticket import MAX_TEXT, MAX_TOKENS, Ticket
from kvferry.core.messages import DECODE_ERRORS
from kvferry.core.security import Proof, TicketKey, TicketSecrets
from kvferry.core.security.proof import content_of

VERSION = 1
KEY = "kvferry"
"""The key under which a ticket carries what NixlConnector's keys have no place for."""

Hex = Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=512)]
Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Own(Struct, frozen=True, kw_only=True):
    """What stands under ``kvferry``."""

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


class _Params(Struct, frozen=True, kw_only=True):
    """NixlConnector's keys, as far as they are read; others are ignored."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: Integer
    remote_block_ids: Annotated[list[list[Integer]], Meta(max_length=MAX_GROUPS)]
    tp_size: Integer


SIGNATURE = "signature"
PROOF = "proof"
ROUTED = ("remote_host", "remote_port")
"""What routers rewrite where engines and their clients are in different networks."""

S = TypeVar("S", bound=Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """An engine's parallelism, as NixlConnector's keys have it."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketParams:
    """What a producer says about one request; `Ticket` has the meaning of each.

    Unlike a ticket it is not checked: an engine that serves no handshake, as in a test of its
    scheduler alone, still hands out params, with port 0, and whoever reads them refuses.
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

    def params(
        self, secrets: TicketSecrets | None = None, ticket_key: TicketKey | None = None
    ) -> dict[str, Any]:
        """The ``kv_transfer_params`` with which a router asks another engine to decode.

        Args:
            secrets: to sign them with.
            ticket_key: to prove them with; published in the handshake.
        """
        params = self._unsigned()
        if ticket_key is not None:
            params[KEY] |= {
                "host": self.host,
                "port": self.port,
                "ticket_key": ticket_key.public.hex(),
            }
            params[KEY][PROOF] = ticket_key.sign(_proved(params)).hex()
        if secrets is not None:
            params[KEY][SIGNATURE] = secrets.sign(_said(params)).hex()
        return params

    def _unsigned(self) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
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
            },
        }


def read(
    params: Mapping[str, Any], secrets: TicketSecrets | None = None, *, prompt: int = MAX_TOKENS
) -> Ticket:
    """The ticket in a decode request's ``kv_transfer_params``.

    Args:
        params: from a client.
        secrets: one of which it must be signed with; ``None`` if none here are signed.
        prompt: how many tokens the request's has. No page covers less than one, so what a client
            can have looked at is bounded by what it sent itself.

    Raises:
        TicketError: it is another connector's, of another version, malformed, or longer than the
            prompt; or it is signed and should not be, or is not signed as it should be; or it has
            neither a signature nor a proof. Whether its proof fits is known only after the
            handshake (``check_against``).
    """
    if KEY not in params:
        raise TicketError(
            f"the ticket has no {KEY!r} key, so another connector made it: let both engines use "
            "KVFerryConnector, and the router pass kv_transfer_params on whole",
            reason=TicketReason.FOREIGN,
        )
    own = _convert(params[KEY], _Own, f"kv_transfer_params[{KEY!r}]")
    if own.version != VERSION:
        raise TicketError(
            f"the ticket has version {own.version}; this engine reads {VERSION}",
            reason=TicketReason.VERSION,
        )
    _check_lengths(params.get("remote_block_ids"), prompt)
    known = _convert(dict(params), _Params, "kv_transfer_params")
    _check_signature(params, bytes.fromhex(own.signature), secrets)
    proof = _proof(own, params)
    if proof is None and secrets is None:
        # Whoever listens somewhere could pass for an engine of an older build, and have any page
        # of an honest one read by a ticket of his own.
        raise TicketError(
            "the ticket has neither a proof nor a signature: upgrade the kvferry of its engine, "
            "or give both engines ticket_secrets",
            reason=TicketReason.PROOF,
        )
    host, port, routed = _places(own, known, signed=secrets is not None)
    return Ticket(
        engine=known.remote_engine_id,
        incarnation=_number(own.incarnation),
        request=known.remote_request_id[:MAX_TEXT],  # vLLM's users choose it
        host=host,
        port=port,
        hold=Hold(slot=own.slot, generation=_number(own.generation)),
        pages=tuple(map(tuple, known.remote_block_ids)),
        first_index=tuple(own.first_index),
        tokens=own.tokens,
        digest=bytes.fromhex(own.digest),
        computed=own.computed,
        tp_size=known.tp_size,
        key=bytes.fromhex(own.key),
        routed=routed,
        proof=proof,
    )


def _places(own: _Own, known: _Params, *, signed: bool) -> tuple[str, int, tuple[str, int] | None]:
    """Return where to ask first, and where to ask if nobody answers there.

    With ``ticket_secrets`` only the address that they sign is asked.
    """
    routed = known.remote_host, known.remote_port
    if not own.host:
        return *routed, None
    mine = own.host, own.port
    return *mine, None if signed or routed == mine else routed


def _proof(own: _Own, params: Mapping[str, Any]) -> Proof | None:
    """Return the proof that a ticket carries; half of one raises ``TicketError``."""
    if not own.ticket_key and not own.proof:
        return None
    return Proof(
        key=bytes.fromhex(own.ticket_key),
        content=content_of(_proved(params)),
        signature=bytes.fromhex(own.proof),
    )


def _check_lengths(lists: object, prompt: int) -> None:
    """Before anything looks at every page of them."""
    for ids in lists if isinstance(lists, list | tuple) else ():
        if isinstance(ids, list | tuple) and len(ids) > prompt:
            raise TicketError(
                f"the ticket lists {len(ids)} blocks for a prompt of {prompt} tokens",
                reason=TicketReason.PROMPT,
            )


def _check_signature(
    params: Mapping[str, Any], signature: bytes, secrets: TicketSecrets | None
) -> None:
    if secrets is not None:
        secrets.check(_said(params), signature)
    elif signature:
        raise TicketError(
            "the ticket is signed, and this engine has no ticket_secrets to check it with: give it "
            "those of the ticket's engine",
            reason=TicketReason.SIGNATURE,
        )


def _said(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what secrets sign: all that is read, and all under our own key, also what only newer
    versions know. What routers may change (``do_remote_prefill``, say) is not read, and the address
    is the one that the producer means where it says one."""
    said = {name: params[name] for name in _Params.__struct_fields__}
    own = {name: value for name, value in params[KEY].items() if name != SIGNATURE}
    if own.get("host"):
        said.update(zip(ROUTED, (own["host"], own.get("port")), strict=True))
    return {**said, KEY: own}


def _proved(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a proof covers: what secrets sign, but for the address that routers rewrite; the
    producer's own is under our key."""
    said = {name: params[name] for name in _Params.__struct_fields__ if name not in ROUTED}
    own = {name: params[KEY][name] for name in params[KEY] if name not in (SIGNATURE, PROOF)}
    return {**said, KEY: own}


def _convert(value: object, struct: type[S], where: str) -> S:
    try:
        return msgspec.convert(value, struct)
    except DECODE_ERRORS as exc:
        raise TicketError(f"{where}: {exc}") from exc


def _number(text: str) -> int:
    return int(text, 16) if text else 0
