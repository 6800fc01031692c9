"""The deployments in ``examples/serving``: what they configure, and what their users' tools say."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.serving.serve import HEALTH_CHECKS
from kvferry.integrations.vllm.config import parse
from tests.cli.command import run_kvferry

SERVING = Path(__file__).parents[3] / "examples" / "serving"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
MAKEFILE = (SERVING.parents[1] / "Makefile").read_text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One ``vllm serve``: its arguments, the files that it finds, where the router asks for it."""

    arguments: list[str]
    files: set[str]
    host: str

    @property
    def transfer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(option(self.arguments, "kv-transfer-config"))
        return found

    @property
    def extra(self) -> dict[str, Any]:
        found: dict[str, Any] = self.transfer["kv_connector_extra_config"]
        return found


Deployment = tuple[dict[str, Engine], list[str]]
"""Both engines, by role, and the arguments of the router."""


def option(arguments: Sequence[str], name: str) -> str:
    """Return the value of ``--name=VALUE`` or ``--name VALUE``."""
    for index, argument in enumerate(arguments):
        if argument == f"--{name}":
            return arguments[index + 1]
        if argument.startswith(f"--{name}="):
            return argument.partition("=")[2]
    raise AssertionError(f"--{name} is missing in {arguments}")


def documents(name: str) -> list[Any]:
    """Return what a YAML file of the folder has."""
    return list(pytest.importorskip("yaml").safe_load_all((SERVING / name).read_text()))


def filled(part: str, variables: Mapping[str, str]) -> str:
    """Fill in variables, as ``${NAME}`` or ``$(NAME)``; one that is not known is its name."""
    return re.sub(r"\$[{(](\w+)[^})]*[})]", lambda name: variables.get(name[1], name[1]), part)


def compose() -> Deployment:
    services = documents("docker-compose.yml")[0]["services"]
    engines = {
        role: Engine(
            arguments=[filled(part, {}) for part in services[role]["command"][2:]],
            files={f"/run/secrets/{name}" for name in services[role]["secrets"]},
            host=role,
        )
        for role in ROLES
    }
    return engines, services["router"]["command"][1:]


def systemd() -> Deployment:
    lines = (SERVING / "systemd" / "serving.conf").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    variables["CREDENTIALS_DIRECTORY"] = "/run/credentials"

    def unit(file: str, name: str, **own: str) -> tuple[list[str], list[str]]:
        text = (SERVING / "systemd" / file).read_text().replace("\\\n", " ").replace("%i", name)
        [command] = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
        files = re.findall("^LoadCredential=([^:]+):", text, re.MULTILINE)
        return [filled(part, variables | own) for part in shlex.split(command)], files

    def engine(role: str) -> Engine:
        host = variables[role.upper()].removeprefix("http://").split(":")[0]
        [peer] = ROLES.keys() - {role}
        own = {"ADDRESS": host, "ROLE": ROLES[role], "PEER": peer}
        command, files = unit("kvferry@.service", role, **own)
        paths = {f"/run/credentials/{name}" for name in files}
        return Engine(arguments=command[2:], files=paths, host=host)

    return {role: engine(role) for role in ROLES}, unit("kvferry-router.service", "")[0][1:]


def kubernetes() -> Deployment:
    settings = documents("kubernetes/kustomization.yaml")[0]
    files = {entry["name"]: entry["files"] for entry in settings["secretGenerator"]}
    literals = settings["configMapGenerator"][0]["literals"]
    variables = dict(literal.split("=", 1) for literal in literals)
    found = {
        (each["kind"], each["metadata"]["name"]): each["spec"]
        for name in settings["resources"]
        for each in documents(f"kubernetes/{name}")
    }

    def engine(role: str) -> Engine:
        spec = found["StatefulSet", role]["template"]["spec"]
        [container] = spec["containers"]
        [secret] = [each["secret"] for each in spec["volumes"] if "secret" in each]
        own = variables | {"POD_NAME": f"{role}-0", "POD_IP": "10.0.0.1"}
        names = {Path(file).name for file in files[secret["secretName"]]}
        return Engine(
            arguments=[filled(part, own) for part in container["args"]],
            files={f"/etc/kvferry/keys/{name}" for name in names},
            host=f"{role}-0.{role}",
        )

    [router] = found["Deployment", "router"]["template"]["spec"]["containers"]
    return {role: engine(role) for role in ROLES}, router["args"]


DEPLOYMENTS: dict[str, Callable[[], Deployment]] = {
    "docker-compose.yml": compose,
    "systemd": systemd,
    "kubernetes": kubernetes,
}


@pytest.fixture(params=DEPLOYMENTS)
def deployment(request: pytest.FixtureRequest) -> Deployment:
    return DEPLOYMENTS[request.param]()


def test_the_connectors_settings_and_keys(deployment: Deployment) -> None:
    """Each engine has its own secret key and the other's public one, where the settings say."""
    for role, engine in deployment[0].items():
        parse(engine.extra)
        transfer, extra = engine.transfer, engine.extra
        assert transfer["kv_connector"] == "KVFerryConnector"
        assert transfer["kv_role"] == ROLES[role]
        assert transfer["engine_id"] == f"{role}-0"
        assert transfer["kv_load_failure_policy"] == "recompute"
        [peer] = ROLES.keys() - {role}
        peers, secrets = extra["curve_peers"], extra["ticket_secrets"]
        places = [extra["curve_secret_key"], *peers, *secrets]
        assert {place.removeprefix("file:") for place in places} <= engine.files
        names = [Path(place).name for place in places]
        assert names[0] == f"{role}.secret"
        assert {*names[1:]} == {f"{peer}.public", "probe.public", "ticket.secret"}
        assert f"{peer}.secret" not in {Path(file).name for file in engine.files}


def test_the_router_asks_the_engines_where_they_listen_and_as_often(deployment: Deployment) -> None:
    engines, router = deployment
    assert "--vllm-pd-disaggregation" in router
    for role, engine in engines.items():
        port = option(engine.arguments, "port")
        assert option(router, role) == f"http://{engine.host}:{port}"
    assert tuple(part for part in router if part.startswith("--health-")) == HEALTH_CHECKS


def probes() -> Iterator[tuple[str, list[str]]]:
    """The commands of compose and Kubernetes that ask an engine's health."""
    services = documents("docker-compose.yml")[0]["services"]
    for role in ROLES:
        yield role, services[role]["healthcheck"]["test"][1:]
        spec = documents(f"kubernetes/{role}.yaml")[1]["spec"]["template"]["spec"]
        line = spec["containers"][0]["readinessProbe"]["exec"]["command"][-1]
        yield role, shlex.split(line)[1:]


def test_probes_ask_the_side_channel_with_a_key_of_their_own() -> None:
    """And end by themselves before they are killed after 5 s, to say why there is no answer."""
    for role, command in probes():
        assert (command[:2], command[3]) == (["kvferry", "health"], "5600")
        names = [Path(option(command, name)).name for name in ("curve-secret-key", "curve-peer")]
        assert names == ["probe.secret", f"{role}.public"]
        assert float(option(command, "timeout")) < 5


@pytest.mark.timeout(300)
def test_vllm_and_the_router_accept_the_arguments() -> None:
    """In a process of its own: vLLM's imports warn."""
    pytest.importorskip("vllm_router")
    deployments = [read() for read in DEPLOYMENTS.values()]
    engines = [engine for both, _ in deployments for engine in both.values()]
    given = {
        "servers": [engine.arguments for engine in engines],
        "routers": [router for _, router in deployments],
    }
    ran = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps(given), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == [engine.extra for engine in engines]


PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_router.launch_router import parse_router_args

given = json.load(sys.stdin)
parser = make_arg_parser(FlexibleArgumentParser())
parsed = [parser.parse_args(arguments) for arguments in given["servers"]]
assert all(parse_router_args(arguments).vllm_pd_disaggregation for arguments in given["routers"])
print(json.dumps([one.kv_transfer_config.kv_connector_extra_config for one in parsed]))
"""


# What the tools say.


def run(folder: Path, *command: str) -> str:
    """Run a tool that has to succeed; return what it prints."""
    tool = shutil.which(command[0])
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    ran = subprocess.run(
        [tool, *command[1:]],
        cwd=folder,
        env=os.environ | {"MODEL": "m"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


def make_keys(folder: Path) -> set[str]:
    """Make keys as the README says; return the names of the files."""
    names = [f"--engine={name}" for name in (*ROLES, "probe")]
    ran = run_kvferry(dict(os.environ), "keygen", str(folder), *names)
    assert ran.returncode == 0, ran.stderr
    return {path.name for path in folder.iterdir()}


def test_compose_accepts_its_file_and_finds_every_secret(tmp_path: Path) -> None:
    secrets = documents("docker-compose.yml")[0]["secrets"]
    names = make_keys(tmp_path / "keys")
    assert secrets == {name: {"file": f"keys/{name}"} for name in names}
    shutil.copy(SERVING / "docker-compose.yml", tmp_path)
    command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
    assert "KVFerryConnector" in run(tmp_path, *command, "config")


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """With empty programs instead of those in /usr/local/kvferry, which this machine lacks."""
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "vllm-router"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    units = []
    for name in ("kvferry@prefill", "kvferry@decode", "kvferry-router"):
        unit = SERVING / "systemd" / f"{re.sub('@.*', '@', name)}.service"
        units.append(tmp_path / f"{name}.service")
        units[-1].write_text(unit.read_text().replace("/usr/local/kvferry/bin", f"{tmp_path}/bin"))
    said = run(tmp_path, "systemd-analyze", "verify", *map(str, units))
    assert str(tmp_path) not in said, said


def test_kubernetes_accepts_the_manifests(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    validator = pytest.importorskip("kubernetes_validate")
    shutil.copytree(SERVING / "kubernetes", tmp_path, dirs_exist_ok=True)
    make_keys(tmp_path / "keys")
    built = list(yaml.safe_load_all(run(tmp_path, "kubectl", "kustomize", ".")))
    for document in built:
        validator.validate(document, validator.latest_version(), strict=True)
    # A name with a hash of the contents would make new Secrets, and replace the pods.
    names = {entry["metadata"]["name"] for entry in built if entry["kind"] == "Secret"}
    generated = documents("kubernetes/kustomization.yaml")[0]["secretGenerator"]
    assert names == {entry["name"] for entry in generated}


def test_image_and_readme_have_the_versions_that_are_tested() -> None:
    dockerfile, readme = ((SERVING / name).read_text() for name in ("Dockerfile", "README.md"))
    vllm, router = (
        dict(re.findall(r"^(\w+) := (\S+)$", MAKEFILE, re.MULTILINE))[f"{name}_VERSION"]
        for name in ("VLLM", "ROUTER")
    )
    assert f"vllm/vllm-openai:v{vllm}\n" in dockerfile
    assert f"vllm-router=={router}'" in dockerfile
    assert f"vllm=={vllm}" in readme
    assert f"vllm-router=={router}" in readme
