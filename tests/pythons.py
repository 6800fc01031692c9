"""Run the quick tests on several versions of Python: ``python tests/pythons.py 3.12 3.13``.

Each version gets an environment of its own under ``.cache``, without vLLM and torch. A version that
is not on this machine is skipped, and said to be. Needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".cache"
STAMP = ".installed"
SAYS_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def main(versions: list[str]) -> int:
    """Test every version that is there, and say what came of it."""
    outcomes = {version: _tested(version) for version in versions}
    _say("")
    for version, outcome in outcomes.items():
        _say(f"Python {version}: {outcome}")
    return int(not is_success(list(outcomes.values())))


def is_success(outcomes: list[str]) -> bool:
    """Return whether tests passed on at least one version and failed on none."""
    return "passed" in outcomes and "FAILED" not in outcomes


def find_interpreter(version: str) -> Path | None:
    """Return an interpreter of this version, or ``None``: on the path, of uv, or of pyenv."""
    return next((found for found in _candidates(version) if is_version(found, version)), None)


def is_version(interpreter: Path, version: str) -> bool:
    """Return whether an interpreter starts and is of this version.

    A name on the path says neither: pyenv's stand-ins exist for versions that are switched off.
    """
    return _output(str(interpreter), "-c", SAYS_VERSION) == version


def _candidates(version: str) -> Iterator[Path]:
    name = f"python{version}"
    for found in (shutil.which(name), _output("uv", "python", "find", "--no-project", version)):
        if found:
            yield Path(found)
    if prefix := _output("pyenv", "prefix", version):
        yield Path(prefix) / "bin" / name


def _output(*command: str) -> str:
    """Return what a command prints; nothing if it fails or does not exist."""
    if shutil.which(command[0]) is None:
        return ""
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else ""


def _tested(version: str) -> str:
    interpreter = find_interpreter(version)
    if interpreter is None:
        return (
            "SKIPPED, since it is not on this machine: install it by the system's packages, by "
            f"'pyenv install {version}' or by 'uv python install {version}'"
        )
    _say(f"\n== Python {version}: {interpreter}")
    environment = ENVIRONMENTS / f"python-{version}"
    _install(interpreter, environment)
    pytest = [str(environment / "bin" / "pytest"), "-n", "auto", "--maxprocesses", "4"]
    return "FAILED" if subprocess.run(pytest, cwd=ROOT, check=False).returncode else "passed"


def _install(interpreter: Path, environment: Path) -> None:
    """Make an environment, unless it was made from the same ``pyproject.toml`` before."""
    stamp = environment / STAMP
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    subprocess.run([interpreter, "-m", "venv", "--clear", environment], check=True)
    pip = [str(environment / "bin" / "pip"), "install", "--quiet"]
    subprocess.run([*pip, "--editable", f"{ROOT}[dev]"], check=True)
    stamp.write_text(wanted)  # last, so that what an interruption leaves is made anew


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()  # what pytest prints has to come after it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
