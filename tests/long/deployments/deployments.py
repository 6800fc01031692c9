"""Reads the deployments in ``examples/serving``: who starts what, with which settings and files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SERVING = Path(__file__).parents[3] / "examples" / "serving"
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One ``vllm serve``, as a deployment starts it."""

    arguments: list[str]
    files: set[str]
    url: str
    grace: float

    @property
    def transfer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.option("kv-transfer-config"))
        return found

    @property
    def extra(self) -> dict[str, Any]:
        found: dict[str, Any] = self.transfer["kv_connector_extra_config"]
        return found

    def option(self, name: str) -> str:
        return option(self.arguments, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Both engines, by role, and the arguments of the router."""

    engines: dict[str, Engine]
    router: list[str]


def option(arguments: Sequence[str], name: str) -> str:
    """Return the value of ``--name=VALUE`` or ``--name VALUE``."""
    for index, argument in enumerate(arguments):
        if argument == f"--{name}":
            return arguments[index + 1]
        if argument.startswith(f"--{name}="):
            return argument.partition("=")[2]
    raise AssertionError(f"--{name} is missing in {arguments}")


def compose() -> Deployment:
    """Return what ``docker-compose.yml`` starts."""
    services = compose_file()["services"]

    def engine(role: str) -> Engine:
        service = services[role]
        [vllm, serve, *arguments] = [_filled(part) for part in service["command"]]
        assert (vllm, serve) == ("vllm", "serve")
        return Engine(
            arguments=arguments,
            files={f"/run/secrets/{name}" for name in service["secrets"]},
            url=f"{role}:{option(arguments, 'port')}",
            grace=float(service["stop_grace_period"].removesuffix("s")),
        )

    [router, *arguments] = services["router"]["command"]
    assert router == "vllm-router"
    return Deployment(engines={role: engine(role) for role in ROLES}, router=arguments)


def documents(name: str) -> list[Any]:
    """Return what a YAML file of the folder has."""
    return list(pytest.importorskip("yaml").safe_load_all((SERVING / name).read_text()))


def compose_file() -> dict[str, Any]:
    [found] = documents("docker-compose.yml")
    return dict(found)


def systemd() -> Deployment:
    """Return what the units start, with the variables of ``serving.conf``."""
    variables = dict(
        line.split("=", 1)
        for line in (SERVING / "systemd" / "serving.conf").read_text().splitlines()
        if line and not line.startswith("#")
    )
    addresses = {role: variables[role.upper()].removeprefix("http://") for role in ROLES}

    def engine(role: str) -> Engine:
        unit = read_unit(role)
        host = addresses[role].split(":")[0]
        credentials = {"CREDENTIALS_DIRECTORY": "/run/credentials", "ADDRESS": host}
        arguments = _command(unit, variables | credentials, "/usr/local/kvferry/bin/vllm", "serve")
        return Engine(
            arguments=arguments,
            files={f"/run/credentials/{line.split(':')[0]}" for line in unit["LoadCredential"]},
            url=f"{option(arguments, 'host')}:{option(arguments, 'port')}",
            grace=float(unit["TimeoutStopSec"][0]),
        )

    router = _command(read_unit("router"), variables, "/usr/local/kvferry/bin/vllm-router")
    return Deployment(engines={role: engine(role) for role in ROLES}, router=router)


def read_unit(name: str) -> dict[str, list[str]]:
    """Return the settings of a unit; each may be set several times."""
    text = (SERVING / "systemd" / f"kvferry-{name}.service").read_text()
    settings: dict[str, list[str]] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(key, []).append(value)
    return settings


def _command(unit: dict[str, list[str]], variables: Mapping[str, str], *start: str) -> list[str]:
    """Split the command of a unit and fill in variables, as systemd does."""
    [line] = unit["ExecStart"]
    parts = [
        re.sub(r"\$\{(\w+)\}", lambda name: variables[name[1]], part) for part in shlex.split(line)
    ]
    assert parts[: len(start)] == list(start)
    return parts[len(start) :]


def kubernetes() -> Deployment:
    """Return what the manifests start, with the files that their secrets are made of."""
    documents = {(found["kind"], found["metadata"]["name"]): found for found in manifests()}
    settings = kustomization()
    generated = {entry["name"]: entry["files"] for entry in settings["secretGenerator"]}
    [config] = settings["configMapGenerator"]
    variables = dict(literal.split("=", 1) for literal in config["literals"])

    def engine(role: str) -> Engine:
        spec = documents["StatefulSet", role]["spec"]["template"]["spec"]
        [container] = spec["containers"]
        assert container["command"] == ["vllm", "serve"]
        assert {"configMapRef": {"name": config["name"]}} in container["envFrom"]
        known = variables | {"POD_NAME": f"{role}-0", "POD_IP": "10.0.0.1"}
        assert {entry["name"] for entry in container["env"]} >= {"POD_NAME", "POD_IP"}
        [volume] = [found for found in spec["volumes"] if "secret" in found]
        [mount] = [found for found in container["volumeMounts"] if found["name"] == volume["name"]]
        names = [Path(file).name for file in generated[volume["secret"]["secretName"]]]
        arguments = [
            re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], part) for part in container["args"]
        ]
        return Engine(
            arguments=arguments,
            files={f"{mount['mountPath']}/{name}" for name in names},
            url=f"{role}-0.{role}:{option(arguments, 'port')}",
            grace=spec["terminationGracePeriodSeconds"],
        )

    [router] = documents["Deployment", "router"]["spec"]["template"]["spec"]["containers"]
    return Deployment(engines={role: engine(role) for role in ROLES}, router=router["args"])


def manifests() -> list[dict[str, Any]]:
    """Return every object of the Kubernetes manifests."""
    names = kustomization()["resources"]
    return [document for name in names for document in documents(f"kubernetes/{name}")]


def kustomization() -> dict[str, Any]:
    [found] = documents("kubernetes/kustomization.yaml")
    return dict(found)


def keygen_files() -> list[str]:
    """Return the names of the files that ``kvferry keygen`` writes, as the README calls it."""
    names = [f"{name}.{kind}" for name in (*ROLES, "probe") for kind in ("secret", "public")]
    return [*names, "ticket.secret"]


def _filled(part: str) -> str:
    """Replace compose's variables by their names."""
    return re.sub(r"\$\{(\w+)[^}]*\}", lambda name: name[1], part)


DEPLOYMENTS = {
    "docker-compose.yml": compose,
    "systemd": systemd,
    "kubernetes": kubernetes,
}
