"""Send each request to a prefill and to a decode server at once, so that caches cross early.

    python examples/serving/early_proxy.py --prefill URL --decode URL [--host HOST] [--port PORT]

A small proxy of kvferry's own, to try early tickets (docs/vllm.md): decode loads the cache of the
chunks that are computed while prefill computes the next ones. It takes servers by turns and has no
retries, no health checks and no metrics. `--prefill` and `--decode` can be given several times.

It needs no settings of the engines. The first request to each prefill server goes the usual way:
first to prefill, and then to decode with prefill's ticket. The ticket also says which engine it is,
and where its side channel is; each further answer says so again. A server that has several
data-parallel engines is not for this proxy, because any of them may answer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

PATHS = ("/v1/completions", "/v1/chat/completions")
ONE_TOKEN = {"max_tokens": 1, "n": 1, "stream": False}
"""What prefill is asked for, in place of what the client asks for."""
FORWARDED = ("Authorization", "X-Request-Id")  # the headers of clients that servers get

Ticket = dict[str, Any]  # what prefill answers as ``kv_transfer_params``

logger = logging.getLogger("early_proxy")


class RefusedError(Exception):
    """Prefill has answered with an error, which the client gets."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body[:200]}")
        self.status = status
        self.body = body


@dataclass(kw_only=True)
class Prefill:
    """A prefill server, and what decode needs to know to follow a request there.

    That is learnt from the last ticket; it is empty before the first, and when the server has
    failed.
    """

    url: str
    engine: dict[str, str] = field(default_factory=dict)

    def learn(self, ticket: Mapping[str, Any]) -> None:
        """Take from a ticket which engine has made it, and where its side channel is."""
        host = str(ticket["remote_host"])
        address = f"[{host}]" if ":" in host else host
        self.engine = {
            "remote_engine_id": str(ticket["remote_engine_id"]),
            "remote_bootstrap_addr": f"http://{address}:{ticket['remote_port']}",
            "remote_bootstrap_key": str(ticket["kvferry"].get("key", "")),
        }


class Proxy:
    """Pass requests on to prefill and decode servers."""

    def __init__(self, prefills: list[str], decodes: list[str]) -> None:
        self._prefills: Iterator[Prefill] = itertools.cycle([Prefill(url=url) for url in prefills])
        self._decodes = itertools.cycle(decodes)
        self._legs: set[asyncio.Task[Ticket]] = set()
        self._session: ClientSession

    def app(self) -> web.Application:
        """Return the application that answers clients."""
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.get("/health", self._health)])
        app.add_routes([web.post(path, self._answer) for path in PATHS])
        app.cleanup_ctx.append(self._connect)
        return app

    async def _connect(self, app: web.Application) -> AsyncIterator[None]:
        # a connection for each request: a server may close one that is kept just as it is used.
        connector = TCPConnector(force_close=True, limit=0)
        timeout = ClientTimeout(total=None)
        async with ClientSession(connector=connector, timeout=timeout) as self._session:
            yield

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of a client. If the client leaves, both legs are cancelled."""
        body = await request.json()
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        prefill, url = next(self._prefills), next(self._decodes) + request.path
        room = f"early-{uuid.uuid4()}"
        params = {"do_remote_prefill": True, "transfer_id": room, **prefill.engine}
        is_early = bool(prefill.engine)
        prefilled = self._start(self._prefill(prefill, request.path, body, headers, room))
        answered = ended = False
        try:
            if not is_early:
                params = await prefilled
            body = {**body, "kv_transfer_params": params}
            async with await self._decode(url, body, headers, prefilled) as answer:
                answered = True
                passed = await _pass_on(answer, request)
                ended = True
                return passed
        except RefusedError as error:
            return web.Response(
                status=error.status, text=error.body, content_type="application/json"
            )
        except (ClientError, KeyError, ValueError) as error:
            if answered:  # a part of the answer is sent: break the connection
                raise
            logger.warning("%s: %s: %s", request.path, type(error).__name__, error)
            return web.json_response({"error": {"message": str(error), "code": 502}}, status=502)
        finally:
            if not ended:
                prefilled.cancel()

    def _start(self, leg: Coroutine[Any, Any, Ticket]) -> asyncio.Task[Ticket]:
        """Start prefill's leg, whose answer may come after decode's."""
        task = asyncio.create_task(leg)
        self._legs.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Ticket]) -> None:
        self._legs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("prefill: %s: %s", type(error).__name__, error)

    async def _prefill(
        self, prefill: Prefill, path: str, body: Mapping[str, Any], headers: Any, room: str
    ) -> Ticket:
        """Have a prompt computed; return the ticket.

        Raises:
            RefusedError: the server has answered with an error.
            ClientError, KeyError, ValueError: it has failed, or has made no ticket.
        """
        asked = {**body, **ONE_TOKEN}
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        asked.pop("stream_options", None)
        asked["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": room}
        try:
            async with self._session.post(prefill.url + path, json=asked, headers=headers) as got:
                if got.status != 200:
                    raise RefusedError(got.status, await got.text())
                ticket: Ticket | None = (await got.json()).get("kv_transfer_params")
            if ticket is None:
                raise ValueError(f"{prefill.url} made no ticket; its log says why")
            prefill.learn(ticket)
        except (ClientError, KeyError, ValueError):
            prefill.engine = {}  # the next request will say who is there now
            raise
        return ticket

    async def _decode(
        self, url: str, body: Any, headers: Any, prefilled: asyncio.Task[Ticket]
    ) -> ClientResponse:
        """Ask decode; give up if prefill fails before decode answers.

        Raises:
            RefusedError, KeyError, ValueError: prefill has failed, or has made no ticket.
            ClientError: one of the servers has failed.
        """
        asked = asyncio.ensure_future(self._session.post(url, json=body, headers=headers))
        try:
            await asyncio.wait({asked, prefilled}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                await prefilled
            return await asked
        finally:
            asked.cancel()


async def _pass_on(answer: ClientResponse, request: web.Request) -> web.StreamResponse:
    """Pass a server's answer on to the client as it comes."""
    kind = answer.headers.get("Content-Type", "application/json")
    response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
    await response.prepare(request)
    async for data in answer.content.iter_any():
        await response.write(data)
    await response.write_eof()
    return response


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(options.prefill, options.decode)
    # a client that leaves has its handler cancelled, and so both legs.
    web.run_app(
        proxy.app(), host=options.host, port=options.port, handler_cancellation=True, print=None
    )


if __name__ == "__main__":
    main()
