"""Serve a model with two vLLM servers and a router, and show what crosses between the servers.

    python examples/serving/serve.py [--model MODEL] [--driver DRIVER] [--port PORT] [-- ARGUMENTS]

One server prefills, the other one decodes. kvferry moves the KV cache of each request from prefill
to decode, with encrypted side channels and signed tickets. Without --model, the model is a tiny
Llama with random weights, which this script makes: nothing is downloaded, and the text is nonsense.

It prints a curl command to try, and a line for each request whose cache was moved. Ctrl-C ends all
servers. ARGUMENTS are passed to both `vllm serve`. With both servers on one GPU, for example:

    python examples/serving/serve.py --model MODEL --driver nixl -- --gpu-memory-utilization=0.4
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "serving"
TINY = "tiny-llama"

SHUTDOWN_SECONDS = 5
"""For how long a server that is told to end still serves its requests, and the pages it holds."""
GRACE_SECONDS = SHUTDOWN_SECONDS + 15.0
POLL_SECONDS = 0.2
LOG_LINES = 15  # how much of a log an error shows

# Each program needs a port, each engine one more for its side channel. They follow --port.
ROUTER, PREFILL, DECODE, PREFILL_CHANNEL, DECODE_CHANNEL, ROUTER_METRICS = range(6)
PORTS = {
    ROUTER: "the router",
    PREFILL: "prefill",
    DECODE: "decode",
    PREFILL_CHANNEL: "prefill's side channel",
    DECODE_CHANNEL: "decode's side channel",
    ROUTER_METRICS: "the router's metrics",
}

# What vLLM's CPU build needs to run twice on one small machine. What is set already stays.
CPU_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": HOST,
}
CPU_ARGUMENTS = ("--enforce-eager",)

# The tiny model has no chat template of its own.
TINY_ARGUMENTS = (
    f"--served-model-name={TINY}",
    "--dtype=float32",
    "--block-size=32",
    "--chat-template={% for message in messages %}{{ message.content }} {% endfor %}",
)

# By default, vllm-router sends requests to a dead engine for up to three minutes, and none to one
# that is back for up to two.
HEALTH_CHECKS = (
    "--health-check-interval-secs=2",
    "--health-failure-threshold=2",
    "--health-success-threshold=1",
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServingError(Exception):
    """The servers cannot be started, or one has ended; the message says why."""


class Interrupted(Exception):
    """One of SIGNALS has arrived: raised by all that pauses or waits."""


class Signals:
    """Counts the signals that ask this script to end.

    A handler that raises could interrupt the start of a program before the program is in
    ``Programs.running``, and it would be left behind.
    """

    received = 0

    def install(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has SIGHUP ignored
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self.received += 1


@dataclass(kw_only=True)
class Program:
    """A running program, in a session of its own, which Ctrl-C in a terminal does not reach."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def status(self) -> int | None:
        """The process's exit status; ``None`` while it runs.

        The process is not reaped, so that its number, and its group's, remain its own.
        """
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        found = os.waitid(os.P_PID, self.process.pid, options)
        return None if found is None else found.si_status

    def kill(self) -> None:
        """End the process, and all that it has started and left behind."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def failure(self) -> ServingError:
        """Return the error that says how the program has ended, with the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return ServingError(
            f"{self.name} has ended (status {self.status}). The last lines of {self.log}:\n\n"
            + "\n".join(f"    {line}" for line in lines)
        )


@dataclass(kw_only=True)
class Programs:
    """The programs that were started and have to be ended, in the order of their starts."""

    folder: Path
    environment: Mapping[str, str]
    signals: Signals
    running: list[Program] = field(default_factory=list)

    def start(self, name: str, command: Sequence[str]) -> Program:
        """Start a program."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                start_new_session=True,
            )
        program = Program(name=name, process=process, log=log)
        self.running.append(program)
        return program

    def pause(self) -> None:
        """Wait a moment."""
        if not self.signals.received:
            time.sleep(POLL_SECONDS)
        if self.signals.received:
            raise Interrupted
        for program in self.running:
            if program.status is not None:
                raise program.failure()

    def wait_ready(self, ports: Mapping[str, int]) -> None:
        """Wait until servers answer, and say how long that takes."""
        began, waiting = time.monotonic(), dict(ports)
        while waiting:
            for name in [name for name, port in waiting.items() if is_ready(port)]:
                del waiting[name]
                say(f"{name} is ready after {time.monotonic() - began:.0f} s")
            self.pause()

    def end(self) -> None:
        """End all programs: ask them to, and kill what is left after a while or a signal."""
        received, until = self.signals.received, time.monotonic() + GRACE_SECONDS
        for program in self.running:
            os.kill(program.process.pid, signal.SIGTERM)
        while self.signals.received == received and time.monotonic() < until:
            if all(program.status is not None for program in self.running):
                break
            time.sleep(POLL_SECONDS)
        for program in self.running:
            program.kill()
        self.running.clear()


def say(text: str) -> None:
    """Print a line at once, if anybody still reads."""
    with suppress(OSError):
        print(text, flush=True)


def is_ready(port: int) -> bool:
    """Return whether a server answers that it is ready."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def check_ports(first: int) -> None:
    """Refuse ports that do not exist or are in use, before anything starts."""
    for offset, user in PORTS.items():
        try:
            socket.create_server((HOST, first + offset)).close()
        except (OSError, OverflowError) as error:
            raise ServingError(
                f"port {first + offset}, for {user}, cannot be used ({error}): end the program "
                f"that listens there, or choose {len(PORTS)} others with --port"
            ) from error


def command(name: str) -> str:
    """Return the path of a command, which is in this Python's environment or on the PATH."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise ServingError(f"there is no command {name!r}: install it (pip install {name})")
    return found


def vllm_version(folder: Path) -> tuple[str, str]:
    """Return vLLM's version, and a folder that has to be on PYTHONPATH ("" if none has).

    `vllm serve` asks for the version of "vllm", and the CPU build is called "vllm-cpu". A folder
    with the metadata of a distribution "vllm", of the same version, mends that.
    """
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("vllm"), ""
    try:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
    except importlib.metadata.PackageNotFoundError as error:
        raise ServingError("vLLM is not installed: run `make serve`, or install it") from error
    metadata = folder / f"vllm-{version}" / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return version, str(metadata.parents[1])


def make_environment(folder: Path, on_path: str, *, on_cpu: bool) -> dict[str, str]:
    """Return the environment variables of all programs; ``on_path`` goes on PYTHONPATH."""
    for name in ("no_proxy", "NO_PROXY"):  # of this script, too, which asks the servers
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), HOST]))
    environment = {"VLLM_CACHE_ROOT": str(folder / "vllm-cache"), **os.environ}
    paths = filter(None, [on_path, environment.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return (CPU_ENVIRONMENT if on_cpu else {}) | environment


def run(*command: str, environment: Mapping[str, str]) -> None:
    """Run a command that has to succeed; it says what is wrong."""
    done = subprocess.run(command, env=dict(environment), stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise ServingError(f"{shlex.join(command)} has failed")


def tiny_model(folder: Path, environment: Mapping[str, str]) -> Path:
    """Return the folder of the tiny model, which is made if it is not there."""
    model = folder / TINY
    if not model.exists():
        say("making a tiny model, once")
        script, unfinished = Path(__file__).parents[1] / "tiny_llama.py", model.with_suffix(".new")
        run(sys.executable, str(script), str(unfinished), environment=environment)
        unfinished.rename(model)
    return model


def make_keys(folder: Path, environment: Mapping[str, str]) -> Path:
    """Return the folder with the keys and the ticket secret, which are made if need be."""
    keys = folder / "keys"
    if not (keys / "ticket.secret").exists():
        # "probe" is for `kvferry health`, which asks an engine with a key of its own.
        names = [f"--engine={name}" for name in ("prefill", "decode", "probe")]
        run(command("kvferry"), "keygen", str(keys), *names, environment=environment)
    return keys


def transfer_config(name: str, *, keys: Path, driver: str, port: int) -> dict[str, Any]:
    """Return the `--kv-transfer-config` of an engine."""
    peer = {"prefill": "decode", "decode": "prefill"}[name]
    return {
        "kv_connector": "KVFerryConnector",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[name],
        # A fixed name: the metrics count by it, and a restarted engine is the same one there.
        "engine_id": f"{name}-0",
        # What cannot be loaded is computed by decode. With "fail", the client gets an error.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "driver": driver,
            "side_channel_host": HOST,
            "side_channel_port": port,
            "curve_secret_key": f"file:{keys}/{name}.secret",
            "curve_peers": [f"file:{keys}/{peer}.public", f"file:{keys}/probe.public"],
            "ticket_secrets": [f"file:{keys}/ticket.secret"],
        },
    }


COUNTERS = {  # of vLLM's /metrics, as regular expressions
    "loads": "vllm:kvferry_loads_total",
    "tokens": "vllm:kvferry_tokens_total",
    "bytes": "vllm:kvferry_bytes_total",
    "waited": 'vllm:kvferry_stage_seconds_sum{.*stage="(?:wait|check|handshake)"[^}]*}',
    "read": 'vllm:kvferry_stage_seconds_sum{.*stage="(?:post|transfer|fence|copy)"[^}]*}',
    "pulls": "vllm:kvferry_load_seconds_count",
    "failed": "vllm:kvferry_failed_loads_total",
    "refused": "vllm:kvferry_refused_tickets_total",
}


def read_counters(port: int) -> dict[str, float] | None:
    """Return what decode has counted so far; ``None`` if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except (OSError, http.client.HTTPException):
        return None
    return {
        name: sum(map(float, re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
        for name, metric in COUNTERS.items()
    }


def describe(new: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines that say what has crossed, by how much each counter has grown."""
    loads = new["loads"]
    if loads:
        waited, read = (new[name] / max(new["pulls"], 1) * 1e3 for name in ("waited", "read"))
        yield (
            f"{loads:.0f} request{'s' if loads > 1 else ''}: {new['tokens']:,.0f} tokens, "
            f"{new['bytes'] / 1e6:,.2f} MB, waited {waited:.1f} ms, read in {read:.1f} ms"
            f"{' on average' if loads > 1 else ''}"
        )
    # A refused ticket may count as a failed load, too.
    if failed := max(new["failed"], new["refused"]):
        yield f"{failed:.0f} not loaded, so decode computes the prompt: decode.log says why"


def show_requests(programs: Programs, port: int) -> None:
    """Print a line for each request that crosses, until something ends this."""
    before = dict.fromkeys(COUNTERS, 0.0)
    while True:
        now = read_counters(port) or before
        for line in describe({name: now[name] - before[name] for name in COUNTERS}):
            say(f"{time.strftime('%H:%M:%S')}  {line}")
        before = now
        programs.pause()


def serve(
    programs: Programs, *, model: str | None, driver: str, first: int, arguments: Sequence[str]
) -> None:
    """Start everything, and show what crosses until something ends this."""
    keys = make_keys(programs.folder, programs.environment)
    served_name = model or TINY
    if model is None:
        model = str(tiny_model(programs.folder, programs.environment))
        arguments = [*TINY_ARGUMENTS, *arguments]
    for name, port, channel in (
        ("prefill", PREFILL, PREFILL_CHANNEL),
        ("decode", DECODE, DECODE_CHANNEL),
    ):
        transfer = transfer_config(name, keys=keys, driver=driver, port=first + channel)
        own = [
            f"--host={HOST}",
            f"--port={first + port}",
            f"--shutdown-timeout={SHUTDOWN_SECONDS}",
            "--disable-uvicorn-access-log",  # this script often asks for the metrics
            f"--kv-transfer-config={json.dumps(transfer)}",
        ]
        programs.start(name, [command("vllm"), "serve", model, *own, *arguments])
    say(f"prefill and decode start; their logs are in {programs.folder}")
    programs.wait_ready({"prefill": first + PREFILL, "decode": first + DECODE})
    router = [
        "--vllm-pd-disaggregation",
        f"--prefill=http://{HOST}:{first + PREFILL}",
        f"--decode=http://{HOST}:{first + DECODE}",
        f"--host={HOST}",
        f"--port={first + ROUTER}",
        f"--prometheus-port={first + ROUTER_METRICS}",
        *HEALTH_CHECKS,
    ]
    programs.start("router", [command("vllm-router"), *router])
    programs.wait_ready({"router": first + ROUTER})
    show_how_to_ask(f"http://{HOST}:{first + ROUTER}/v1/completions", served_name)
    show_requests(programs, first + DECODE)


def show_how_to_ask(url: str, model: str) -> None:
    """Print the command to try, and how to end all."""
    data = json.dumps({"model": model, "prompt": "Why is the sky blue?", "max_tokens": 16})
    say("\nTry this (chat is at /v1/chat/completions, as with any vLLM server):\n")
    say(shlex.join(["curl", url, "-H", "Content-Type: application/json", "-d", data]))
    say("\nCtrl-C ends all. What crosses from prefill to decode:\n")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a model's name or folder (a tiny one is made)")
    parser.add_argument(
        "--driver",
        default="loopback",
        help="what moves the caches: loopback (CPU memory, one host), nixl or ucx (%(default)s)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help=f"the router's port; the {len(PORTS) - 1} after it are used, too (%(default)s)",
    )
    folder_help = "for keys, logs, the tiny model (%(default)s)"
    parser.add_argument("--folder", type=Path, default=FOLDER, help=folder_help)
    parser.add_argument("arguments", nargs="*", help="after `--`: arguments for both `vllm serve`")
    return parser.parse_args()


def main() -> int:
    """Serve until a signal arrives or a program ends; return the exit status."""
    options = parse_arguments()
    signals = Signals()
    signals.install()
    try:
        check_ports(options.port)
        options.folder.mkdir(parents=True, exist_ok=True)
        folder = options.folder.resolve()
        version, on_path = vllm_version(folder)
        on_cpu = "cpu" in version
        environment = make_environment(folder, on_path, on_cpu=on_cpu)
        arguments = [*(CPU_ARGUMENTS if on_cpu else ()), *options.arguments]
        programs = Programs(folder=folder, environment=environment, signals=signals)
        try:
            serve(
                programs,
                model=options.model,
                driver=options.driver,
                first=options.port,
                arguments=arguments,
            )
        except Interrupted:
            say("\nending all (a second Ctrl-C kills)")
        finally:
            programs.end()
    except ServingError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
