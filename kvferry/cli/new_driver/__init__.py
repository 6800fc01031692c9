"""``kvferry new-driver``: write a small driver that works, as a distribution of its own.

``template`` is that driver, under the name "template".
"""

from __future__ import annotations

import keyword
import re
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path

import kvferry
from kvferry.cli.output import output
from kvferry.core.errors import DriverError

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")

_PROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "kvferry-template"
version = "0.1.0"
description = "A driver for kvferry."
requires-python = ">=3.11"
dependencies = ["kvferry>=VERSION", "msgspec>=0.18.6", "numpy>=1.26"]

[project.optional-dependencies]
test = ["kvferry[testing]"]

# The name here is the one that users configure.
[project.entry-points."kvferry.drivers"]
template = "kvferry_template:TemplateTransport"

[tool.hatch.build.targets.wheel]
packages = ["kvferry_template"]

[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = ["-ra", "--import-mode=importlib", "-m", "not slow"]
filterwarnings = ["error"]
timeout = 180
"""

_TESTS = '''\
"""The conformance suite, all of it."""

from kvferry.testing import TransportContract


class TestTemplate(TransportContract):
    factory = "kvferry_template:TemplateTransport"
'''


def run(name: str) -> None:
    """Write a distribution with a driver into the folder ``kvferry-NAME``."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise DriverError(
            f"{name!r} cannot be the name of a driver here: take 1 to 32 of a-z, 0-9 and _, a "
            "letter first"
        )
    if name in entry_points(group="kvferry.drivers").names:
        raise DriverError(f"a driver {name!r} is installed already: take another name")
    folder = Path(f"kvferry-{name.replace('_', '-')}")
    try:
        for path, text in _contents(name).items():
            (folder / path).parent.mkdir(parents=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise DriverError(
            f"{exc.filename or folder} cannot be written ({exc.strerror}): move it away, or take "
            "another name"
        ) from exc
    output().print(
        f"Wrote {folder}: a driver that reads the memory of other processes of this host. "
        f"Install it, look at it, and run the conformance suite, which takes a minute:\n\n"
        f"  pip install --editable '{folder}[test]'\n"
        f"  kvferry drivers\n"
        f"  pytest {folder}",
        markup=False,
    )


def _contents(name: str) -> dict[str, str]:
    driver = files(__package__).joinpath("template.py").read_text(encoding="utf-8")
    texts = {
        "pyproject.toml": _PROJECT.replace("VERSION", kvferry.__version__),
        f"kvferry_{name}/__init__.py": driver,
        "tests/test_contract.py": _TESTS,
    }
    prefix = name.title().replace("_", "")
    return {
        path: text.replace("Template", prefix)
        .replace("kvferry-template", f"kvferry-{name.replace('_', '-')}")
        .replace("template", name)
        for path, text in texts.items()
    }
