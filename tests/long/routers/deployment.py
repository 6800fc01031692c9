"""A prefill server, a decode server and a router between them and the clients."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvferry.core.security import generate
from tests.engines.engines import CONNECTOR, PATIENT
from tests.engines.http_server import HttpServer, Program
from tests.free_port import free_port
from tests.long.routers.questions import TEMPLATE

TOY = Path("tests/v1/kv_connector/nixl_integration/toy_proxy_server.py")
MULTI_TURN = Path("examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py")
HEALTH = {TOY: "/healthcheck", MULTI_TURN: "/health"}
"""The proxies in vLLM's source distribution, and where each says that it is up."""

PREFILL = {"kv_role": "kv_producer"}
DECODE = {"kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}


class Servers:
    """Servers that hand over to each other, with signed tickets and encrypted side channels.

    Engine ids, ports and keys stay the same when a server returns.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        sides: Mapping[str, Mapping[str, str]],
        *,
        extra: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to start the servers."""
        self.model = str(model)
        self._model, self._folder, self._sides = model, folder, sides
        self._template = folder / "template"
        self._template.write_text(TEMPLATE)
        self._extra, self._options = dict(extra), dict(options or {})
        self._security = _write_keys(folder, list(sides))
        self._ports = {name: (free_port(), free_port()) for name in sides}
        self._starts = itertools.count()
        self._servers: dict[str, HttpServer] = {}
        for name in sides:
            self.launch(name)

    def __getitem__(self, name: str) -> HttpServer:
        return self._servers[name]

    def __iter__(self) -> Iterator[HttpServer]:
        return iter(self._servers.values())

    def launch(self, name: str) -> None:
        """Start a server, or start it again after its end."""
        port, side_channel = self._ports[name]
        extra = PATIENT | self._extra | self._security[name] | {"side_channel_port": side_channel}
        transfer = {"engine_id": name, "kv_connector_extra_config": extra}
        self._servers[name] = HttpServer(
            f"{name}-{next(self._starts)}",
            self._model,
            self._folder,
            chat_template=str(self._template),
            kv_transfer_config=CONNECTOR | transfer | dict(self._sides[name]),
            port=port,
            **self._options,
        )

    def wait_started(self) -> Self:
        """Return when all answer requests."""
        for server in self:
            server.wait_started()
        return self

    def kill(self, name: str) -> None:
        """End a server at once, as a crash would."""
        self[name].kill()
        self[name].close()

    def close(self) -> None:
        for server in self:
            server.close()


def vllm_router(program: Path, servers: Servers, folder: Path) -> Program:
    """Return vLLM's router (the distribution ``vllm-router``)."""
    port = free_port()
    command: list[str | Path] = [
        program,
        "--vllm-pd-disaggregation",
        *("--prefill", servers["prefill"].address),
        *("--decode", servers["decode"].address),
        *("--policy", "round_robin"),
        *("--port", str(port)),
        *("--prometheus-port", str(free_port())),
        *("--worker-startup-check-interval", "1"),
    ]
    return Program("vllm-router", command, port, "/health", folder)


def proxy(
    script: Path,
    health: str,
    servers: Servers,
    folder: Path,
    *,
    host: str = "127.0.0.1",
) -> Program:
    """Return a proxy of vLLM's source, which reaches both servers by ``host``."""
    port = free_port()
    command: list[str | Path] = [sys.executable, script, "--host", "127.0.0.1", "--port", str(port)]
    for option, server in (("prefiller", servers["prefill"]), ("decoder", servers["decode"])):
        command += [f"--{option}-host", host, f"--{option}-port", server.address.rpartition(":")[2]]
    return Program(script.stem, command, port, health, folder)


def _write_keys(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Write a key pair for each engine and a common secret; return the settings of each engine."""
    secret = _write(folder / "ticket-secret", random.randbytes(32).hex())
    own, public = {}, []
    for name in names:
        pair = generate()
        own[name] = _write(folder / f"{name}.secret", pair.secret.hex())
        public.append(_write(folder / f"{name}.public", pair.public.hex()))
    common = {"ticket_secrets": [secret], "curve_peers": public}
    return {name: {"curve_secret_key": key, **common} for name, key in own.items()}


def _write(path: Path, text: str) -> str:
    """Write a file that only this user can read; return its place as a setting."""
    path.write_text(text)
    path.chmod(0o600)
    return f"file:{path}"
