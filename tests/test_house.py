"""Rules for the package and the repository as a whole."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

import kvferry
from kvferry.integrations.vllm import versions

ROOT = Path(__file__).resolve().parent.parent

#: Modules that importing the package, or the command's help, must not import.
HEAVY = (
    "libucx",
    "nixl",
    "nixl_cu12",
    "llvmlite",
    "lmcache",
    "ray",
    "torch",
    "transformers",
    "ucp",
    "ucxx",
    "vllm",
)

BLOCK_HEAVY = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY!r}))  # None in sys.modules: importing it fails
"""


def run_python(code: str) -> str:
    """Run ``code`` in a new interpreter, check that it succeeds, and return its output."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def modules() -> list[str]:
    """Return the modules of kvferry that have to work without vLLM, torch, Ray and LMCache."""
    package = ROOT / "kvferry"
    paths = (path.relative_to(ROOT).with_suffix("") for path in package.rglob("*.py"))
    names = (".".join(path.parts).removesuffix(".__init__") for path in paths)
    integrations = tuple(
        f"kvferry.integrations.{name}" for name in ("lmcache", "ray.backend", "vllm")
    )
    pictures = ("kvferry.cli.bench.picture", "kvferry.cli.plan.picture")
    needs_more = (*integrations, "kvferry.testing", *pictures)
    return sorted(n for n in names if not n.startswith(needs_more) and not n.endswith("__main__"))


def tracked_texts() -> list[tuple[Path, str]]:
    """Return path and content of every text file that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    present = [path for path in paths if path.is_file()]
    return [(p, p.read_text()) for p in present if b"\0" not in p.read_bytes()]


def test_help_and_plan_import_no_heavy_module(tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text('{"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}')
    code = f"""
import sys
from kvferry.cli import run
for arguments in (["--help"], ["plan", {str(model)!r}, "--prefill=tp=1", "--decode=tp=1"]):
    sys.argv = ["kvferry", *arguments]
    if run():
        raise SystemExit(1)
    print("loaded", *sys.modules)
"""
    helped, planned = (
        line.split() for line in run_python(code).splitlines() if line.startswith("loaded ")
    )
    needless = {"matplotlib", "numpy", "rich.table", "stevedore", "zmq"}
    assert needless.union(HEAVY).isdisjoint(helped)
    assert {"matplotlib", *HEAVY}.isdisjoint(planned)


def test_every_module_and_export_works_without_torch_nixl_and_vllm() -> None:
    imports = "\n".join(f"import {name}" for name in modules())
    exported = ", ".join(kvferry.__all__)
    checked = "kvferry.cli.check_config.run('{}')"
    run_python(f"{BLOCK_HEAVY}\nfrom kvferry import *\nprint({exported})\n{imports}\n{checked}")


def test_the_version_is_that_of_the_distribution() -> None:
    assert kvferry.__version__ == distribution("kvferry").version


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvferry.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("group", "name"),
    [("console_scripts", "kvferry"), ("kvferry.drivers", "loopback"), ("kvferry.drivers", "nixl")],
)
def test_an_entry_point_can_be_loaded(group: str, name: str) -> None:
    (found,) = entry_points(group=group, name=name)
    assert callable(found.load())


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "kvferry" / "py.typed").is_file()


def test_changelog_and_citation_name_the_version() -> None:
    assert kvferry.__version__ in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {kvferry.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_extra_allows_the_versions_of_vllm_that_the_makefile_installs() -> None:
    """From the oldest to the newest on which the connector was run."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extra] = requirements["optional-dependencies"]["vllm"]
    bounds = sorted(tuple(map(int, found)) for found in re.findall(r"(\d+)\.(\d+)", extra))
    makefile = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^(?:OTHER_)?VLLM_VERSIONS? := (.+)$", makefile, re.MULTILINE)
    installed = sorted(
        tuple(map(int, version.split(".")[:2])) for line in lines for version in line.split()
    )
    assert (installed[0], installed[-1]) == (versions.OLDEST, versions.NEWEST)
    assert bounds == [versions.OLDEST, (versions.NEWEST[0], versions.NEWEST[1] + 1)]


def test_no_tracked_file_has_a_path_of_a_machine() -> None:
    folder = re.compile(r"(?<![\w.~<)}\]-])/(?:home|opt|root|tmp|work|Users)/\w")
    index = re.compile(r"https?://\S+/(?:simple|whl)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in tracked_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if folder.search(line) or index.search(line)
    ]
    assert found == []
