"""The deployments in ``examples/serving``: what they configure, and what their users' tools say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvferry.integrations.vllm.config import parse
from tests.cli.command import run_kvferry
from tests.long.deployments.deployments import (
    DEPLOYMENTS,
    ROLES,
    SERVING,
    Deployment,
    Engine,
    compose_file,
    keygen_files,
    kustomization,
    manifests,
    option,
    read_unit,
)

SHUTDOWN_MARGIN = 15.0  # how many seconds more than ``--shutdown-timeout`` an engine needs to end

MAKEFILE = (SERVING.parents[1] / "Makefile").read_text()


@pytest.fixture(params=DEPLOYMENTS)
def deployment(request: pytest.FixtureRequest) -> Deployment:
    return DEPLOYMENTS[request.param]()


def run(*command: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a tool that has to succeed; return what it prints."""
    tool = shutil.which(command[0])
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    ran = subprocess.run(
        [tool, *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the folder of the Kubernetes manifests, with keys."""
    shutil.copytree(SERVING / "kubernetes", tmp_path, dirs_exist_ok=True)
    make_keys(tmp_path / "keys")
    return tmp_path


def make_keys(folder: Path) -> None:
    """Make keys as the README says."""
    names = [f"--engine={name}" for name in (*ROLES, "probe")]
    ran = run_kvferry(dict(os.environ), "keygen", str(folder), *names)
    assert ran.returncode == 0, ran.stderr
    assert {path.name for path in folder.iterdir()} == set(keygen_files())


# What every deployment configures


def test_the_connector_s_settings(deployment: Deployment) -> None:
    for role, engine in deployment.engines.items():
        parse(engine.extra)
        transfer = engine.transfer
        assert transfer["kv_connector"] == "KVFerryConnector"
        assert transfer["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        assert transfer["engine_id"] == f"{role}-0"
        assert transfer["kv_load_failure_policy"] == "recompute"
        assert engine.extra["side_channel_port"]
        # An engine is not killed before its shutdown timeout.
        assert engine.grace >= float(engine.option("shutdown-timeout")) + SHUTDOWN_MARGIN
    assert len({engine.extra["driver"] for engine in deployment.engines.values()}) == 1


def test_keys_and_secrets(deployment: Deployment) -> None:
    """Each engine has its own secret key and the other's public one, where the settings say."""
    for role, engine in deployment.engines.items():
        [peer] = set(ROLES) - {role}
        sources = places(engine)
        assert all(source.startswith("file:") for source in sources)
        assert {source.removeprefix("file:") for source in sources} <= engine.files
        assert Path(engine.extra["curve_secret_key"]).name == f"{role}.secret"
        names = {Path(source).name for source in engine.extra["curve_peers"]}
        assert names == {f"{peer}.public", "probe.public"}
        assert [Path(source).name for source in engine.extra["ticket_secrets"]] == ["ticket.secret"]
        assert f"{peer}.secret" not in {Path(file).name for file in engine.files}


def test_the_router_asks_the_engines_where_they_listen_and_as_often(
    deployment: Deployment,
) -> None:
    from examples.serving.serve import HEALTH_CHECKS

    assert "--vllm-pd-disaggregation" in deployment.router
    for role, engine in deployment.engines.items():
        assert option(deployment.router, role) == f"http://{engine.url}"
    found = [part for part in deployment.router if part.startswith("--health-")]
    assert tuple(found) == HEALTH_CHECKS


def places(engine: Engine) -> list[str]:
    """Return the places of an engine's keys and secrets."""
    extra = engine.extra
    return [extra["curve_secret_key"], *extra["curve_peers"], *extra["ticket_secrets"]]


@pytest.mark.timeout(300)
def test_vllm_and_the_router_accept_the_arguments() -> None:
    """In a process of its own: vLLM's imports warn."""
    pytest.importorskip("vllm_router")
    deployments = [read() for read in DEPLOYMENTS.values()]
    engines = [engine for deployment in deployments for engine in deployment.engines.values()]
    given = {
        "servers": [engine.arguments for engine in engines],
        "routers": [deployment.router for deployment in deployments],
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


# Compose


def compose() -> list[str]:
    """Return the command of compose: its own, or that of a docker which has compose."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], check=False).returncode:
        pytest.skip("neither docker-compose nor a docker with compose is installed")
    return ["docker", "compose"]


def test_compose_accepts_its_file(tmp_path: Path) -> None:
    shutil.copy(SERVING / "docker-compose.yml", tmp_path)
    command = compose()
    shown = run(
        *command, "config", folder=tmp_path, environment={"MODEL": "m", "PATH": "/usr/bin:/bin"}
    )
    assert "KVFerryConnector" in shown


def test_compose_finds_every_secret() -> None:
    found = compose_file()
    assert found["secrets"] == {name: {"file": f"keys/{name}"} for name in keygen_files()}
    for role in ROLES:
        assert set(found["services"][role]["secrets"]) <= set(found["secrets"])


def test_compose_asks_the_side_channels_for_the_engines_health() -> None:
    engines = DEPLOYMENTS["docker-compose.yml"]().engines
    for role in ROLES:
        service = compose_file()["services"][role]
        [word, *command] = service["healthcheck"]["test"]
        assert word == "CMD"
        check_health_command(command, role, role, engines[role])
        assert service["healthcheck"]["timeout"] == f"{PROBE_SECONDS}s"


PROBE_SECONDS = 5


def check_health_command(command: list[str], role: str, host: str, engine: Engine) -> None:
    """Check a probe: it names the engine's side channel, keys that it finds, and a timeout.

    The command has to end before it is killed, to say why the engine does not answer.
    """
    assert float(option(command, "timeout")) < PROBE_SECONDS
    port = str(engine.extra["side_channel_port"])
    assert command[:4] == ["kvferry", "health", host, port]
    for name, file in (("curve-secret-key", "probe.secret"), ("curve-peer", f"{role}.public")):
        place = option(command, name)
        assert Path(place).name == file
        assert place.removeprefix("file:") in engine.files


# systemd


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """With empty programs instead of those in /usr/local/kvferry, which this machine lacks."""
    (tmp_path / "bin").mkdir()
    for name in ("vllm", "vllm-router"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    units = []
    for unit in (SERVING / "systemd").glob("*.service"):
        units.append(tmp_path / unit.name)
        units[-1].write_text(unit.read_text().replace("/usr/local/kvferry/bin", f"{tmp_path}/bin"))
    assert len(units) == len(ROLES) + 1
    said = run("systemd-analyze", "verify", *map(str, units), folder=tmp_path)
    assert str(tmp_path) not in said, said


def test_systemd_tells_only_the_server_to_stop_and_always_restarts_it() -> None:
    for role in ROLES:
        unit = read_unit(role)
        assert unit["KillMode"] == ["mixed"]
        assert unit["Environment"] == [f"HOME=/var/cache/{unit['CacheDirectory'][0]}"]
        assert unit["Restart"] == ["always"]


# Kubernetes


def test_kubernetes_accepts_the_manifests(copy: Path) -> None:
    yaml = pytest.importorskip("yaml")
    validator = pytest.importorskip("kubernetes_validate")
    built = list(yaml.safe_load_all(run("kubectl", "kustomize", ".", folder=copy)))
    for document in built:
        validator.validate(document, validator.latest_version(), strict=True)
    kinds = [document["kind"] for document in built]
    assert len(kinds) == len(manifests()) + len(["ConfigMap", "Secret", "Secret"])
    # a name with a hash of the contents would make new Secrets, and replace the pods.
    names = {entry["metadata"]["name"] for entry in built if entry["kind"] == "Secret"}
    assert names == {entry["name"] for entry in kustomization()["secretGenerator"]}


def test_kubernetes_mounts_the_secrets_for_their_owner_only() -> None:
    for spec in pod_specs("StatefulSet").values():
        [secret] = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert secret["defaultMode"] == 0o400
        names = [entry["name"] for entry in kustomization()["secretGenerator"]]
        assert secret["secretName"] in names


def test_kubernetes_services_have_the_engines_ports() -> None:
    engines = DEPLOYMENTS["kubernetes"]().engines
    services = {
        found["metadata"]["name"]: found["spec"]
        for found in manifests()
        if found["kind"] == "Service"
    }
    for role, engine in engines.items():
        ports = {entry["name"]: entry["port"] for entry in services[role]["ports"]}
        assert ports == {
            "http": int(engine.option("port")),
            "side-channel": engine.extra["side_channel_port"],
        }
        assert services[role]["clusterIP"] == "None"
        [container] = pod_specs("StatefulSet")[role]["containers"]
        assert {entry["name"]: entry["containerPort"] for entry in container["ports"]} == ports


def test_kubernetes_probes_ask_where_the_engines_listen_and_have_time() -> None:
    engines = DEPLOYMENTS["kubernetes"]().engines
    for role, spec in pod_specs("StatefulSet").items():
        [container] = spec["containers"]
        shell, flag, line = container["readinessProbe"]["exec"]["command"]
        assert (shell, flag) == ("sh", "-c")
        command = line.replace('"', "").removeprefix("exec ").split()
        check_health_command(command, role, "$POD_IP", engines[role])
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[kind]["timeoutSeconds"] >= PROBE_SECONDS


def test_kubernetes_names_every_pod_to_the_router() -> None:
    router = DEPLOYMENTS["kubernetes"]().router
    for found in manifests():
        if found["kind"] == "StatefulSet":
            role = found["metadata"]["name"]
            lines = [part for part in router if part.startswith(f"--{role}=")]
            assert len(lines) == found["spec"]["replicas"]
            assert found["spec"]["serviceName"] == role


def test_prometheus_asks_the_engines_of_kubernetes() -> None:
    yaml = pytest.importorskip("yaml")
    file = SERVING.parent / "monitoring" / "prometheus.yml"
    [job] = yaml.safe_load(file.read_text())["scrape_configs"]
    targets = {entry["labels"]["role"]: entry["targets"] for entry in job["static_configs"]}
    engines = DEPLOYMENTS["kubernetes"]().engines
    assert targets == {role: [engine.url] for role, engine in engines.items()}


def pod_specs(kind: str) -> dict[str, dict[str, Any]]:
    """Return what the pods of a kind of object are, by the object's name."""
    return {
        found["metadata"]["name"]: found["spec"]["template"]["spec"]
        for found in manifests()
        if found["kind"] == kind
    }


# Versions


def test_image_and_readme_have_the_versions_that_are_tested() -> None:
    dockerfile, readme = ((SERVING / name).read_text() for name in ("Dockerfile", "README.md"))
    assert f"vllm/vllm-openai:v{variable('VLLM_VERSION')}\n" in dockerfile
    assert f"vllm-router=={variable('ROUTER_VERSION')}'" in dockerfile
    assert f"vllm=={variable('VLLM_VERSION')}" in readme
    assert f"vllm-router=={variable('ROUTER_VERSION')}" in readme


def variable(name: str) -> str:
    """Return the value of a variable of the Makefile."""
    found = re.search(rf"^{name} := (\S+)$", MAKEFILE, re.MULTILINE)
    assert found
    return found[1]
