"""Which requests get a ticket, and for how many of their tokens: pure functions of vLLM's request.

A prompt that is prefilled for another engine gets one. So does the answer to a request that another
engine was to prefill, if answers are held for the next turn of their conversation; whether that
prefill succeeded does not matter, since the answer's pages are complete in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.errors import KVFerryError
from kvferry.integrations.vllm.engine_facts import EngineFacts
from kvferry.integrations.vllm.prompts import cuts_media, has_chain
from kvferry.integrations.vllm.request_ids import prompt_index
from kvferry.integrations.vllm.scheduler_metrics import NoTicket

if TYPE_CHECKING:
    from vllm.v1.request import Request

COMPLETE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Names of vLLM's ``RequestStatus`` for requests that ended with their whole prompt computed."""

TRUNCATED = "_p_side_truncated"
"""Key in a request's params that marks its prompt as truncated already.

A preempted request passes ``on_new_request`` again, and its prompt must not shrink twice.
"""


class NoTicketError(KVFerryError):
    """A request gets no ticket; the text has cause and remedy, and ``reason`` is for metrics.

    The text is empty if nobody wanted a ticket, or the request did not come to its end: then
    nothing is counted or logged.
    """

    def __init__(self, why: str = "", reason: NoTicket | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Decide which requests may get a ticket; ``Producer`` has what they need besides: a hold."""

    facts: EngineFacts

    @property
    def keeps_answers(self) -> bool:
        """Whether answers get tickets for the next turn of their conversation.

        Drafts take states and windows past an answer's last token.
        """
        are_spoiled = self.facts.needs_exact_length and self.facts.drafts
        return self.facts.config.bidirectional_kv_xfer and not are_spoiled

    def is_handed_over(self, request: Request) -> bool:
        """Return whether a request is prefilled here for another engine, which gets its ticket."""
        is_asked = self.facts.hands_over and _asks_for_remote_decode(request)
        return is_asked and not prompt_index(request.request_id)

    def is_answer(self, request: Request) -> bool:
        """Return whether a request's answer is held for the next turn of its conversation."""
        is_prefilled = (request.kv_transfer_params or {}).get("do_remote_prefill")
        is_answered_here = bool(is_prefilled) and not _asks_for_remote_decode(request)
        return self.keeps_answers and is_answered_here

    def check_arrival(self, request: Request) -> None:
        """Raise ``NoTicketError`` for a request that can get none, whatever becomes of it."""
        if not _asks_for_remote_decode(request):
            return
        if not self.facts.hands_over:
            raise NoTicketError(
                'this engine\'s kv_role is "kv_consumer", so no other engine would come for its '
                'pages, and they are not held: set "kv_producer" or "kv_both", or let the router '
                "send do_remote_decode to prefill engines only",
                NoTicket.ROLE,
            )
        if index := prompt_index(request.request_id):
            raise NoTicketError(
                f"it is prompt {index + 1} of a completion request with a list of prompts, and "
                "vLLM answers such a request with the first prompt's ticket only, so its pages are "
                "not held: let clients or the router send each prompt in a request of its own",
                NoTicket.LIST,
            )

    def truncates(self, request: Request) -> bool:
        """Return whether a prompt is to lose its last ``backoff`` tokens before it is computed."""
        return self._must_be_truncated(request) and not cuts_media(request, self.facts.backoff)

    def tokens(self, request: Request) -> int:
        """Return how many tokens an ended request's ticket covers, or raise ``NoTicketError``."""
        is_answer = self.is_answer(request)
        is_complete = request.status.name in COMPLETE
        if not is_complete or not (is_answer or self.is_handed_over(request)):
            raise NoTicketError
        tokens = self._answer_tokens(request) if is_answer else self._prompt_tokens(request)
        if tokens <= 0:
            raise NoTicketError
        return tokens

    def _answer_tokens(self, request: Request) -> int:
        if not has_chain(request):
            raise NoTicketError("its prompt has embeddings")
        # With asynchronous scheduling, a step that is under way may compute the last token. The
        # slot word says that pages are complete only when the device has finished that step.
        computed: int = request.num_computed_tokens
        known: int = request.num_tokens
        if not self.facts.needs_exact_length:
            # A multi-token predictor's pages of the last tokens were made from tokens that are not
            # verified; whoever reads the ticket computes them itself (see ``EngineFacts.backoff``).
            return min(computed, known) - self.facts.backoff
        if computed > known:
            raise NoTicketError(
                "more was computed than its tokens, so its states and windows are past them"
            )
        return computed

    def _prompt_tokens(self, request: Request) -> int:
        exact, backoff = self.facts.needs_exact_length, self.facts.backoff
        tokens: int = min(request.num_computed_tokens, request.num_prompt_tokens)
        if self._must_be_truncated(request) and cuts_media(request, backoff):
            raise NoTicketError(
                f"its prompt ends with an image, and with this model the last {backoff} "
                "tokens are left to decode: an image cannot be computed in two parts, so decode "
                "computes the whole prompt; end prompts with text, as chat templates do",
                NoTicket.CUT_MEDIA,
            )
        if exact and request.num_computed_tokens != tokens:
            raise NoTicketError(
                f"{request.num_computed_tokens} tokens were computed, and the states and windows "
                f"of its prompt of {request.num_prompt_tokens} are gone: prefill with max_tokens 1",
                NoTicket.WENT_ON,
            )
        was_scored = request.skip_reading_prefix_cache and request.num_prompt_tokens > backoff
        if exact and was_scored:
            raise NoTicketError(
                f"it asked for prompt_logprobs, so all {tokens} tokens were computed, and the "
                "states and windows that decode starts from are gone: ask for them on decode, "
                "which then computes the prompt itself",
                NoTicket.SCORED,
            )
        return tokens

    def _must_be_truncated(self, request: Request) -> bool:
        """Return whether a prompt has to be truncated and was not truncated before."""
        if (request.kv_transfer_params or {}).get(TRUNCATED) or request.skip_reading_prefix_cache:
            return False
        return bool(self.facts.backoff) and request.num_prompt_tokens > self.facts.backoff


def _asks_for_remote_decode(request: Request) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))
