"""Engines that tests share, since each takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines import engines, families, probes, ranks
from tests.engines.engines import ROOT, Engine
from tests.engines.fleet import AT_START, fleet
from tests.integrations.vllm.next_version.sdist import SdistError, fetch
from tests.waiting import eventually

StartEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After a test, engines have no request, and all that they had at their start.

    Holds that nobody came for are given up first.
    """
    yield
    for engine in [each for each in AT_START if not each.is_alive]:
        del AT_START[engine]
    for engine, rest in AT_START.items():
        eventually(lambda engine=engine: engine.run(ranks.only_holds))  # type: ignore[misc]
        engine.run(probes.end_holds)
        try:
            eventually(lambda engine=engine, rest=rest: engine.run(ranks.at_rest) == rest)  # type: ignore[misc]
        except AssertionError:
            assert engine.run(ranks.at_rest) == rest, engine.log()[-4000:]
            raise


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama for all engines."""
    scratch = str(tmp_path_factory.mktemp("vllm"))  # vLLM leaves files wherever TMPDIR says
    engines.prepare({"VLLM_CACHE_ROOT": scratch, "TMPDIR": scratch})
    folder = tmp_path_factory.mktemp("tiny_llama")
    engines.run_apart(_build, folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of every family, the Llama's drafter among them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    engines.run_apart(families.build_all, folder, checkpoint)
    return {"llama": checkpoint} | {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def start_engine(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartEngine]:
    """Starts engines, which live to the end of the module unless a test closes them.

    An idle engine still steps: several that outlive their tests keep a core from the others.

    Its arguments are those of `Fleet.launch`.
    """
    with fleet(checkpoint, tmp_path_factory.mktemp("engines")) as engines:
        yield engines.start


@pytest.fixture(scope="session")
def start_shared_engine(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartEngine]:
    """As ``start_engine``, for engines that all modules share."""
    with fleet(checkpoint, tmp_path_factory.mktemp("shared_engines")) as engines:
        yield engines.start


@pytest.fixture(scope="session")
def reference(start_shared_engine: StartEngine) -> Engine:
    """An ordinary engine: what all others must agree with."""
    return start_shared_engine("reference")


@pytest.fixture(scope="session")
def prefill(start_shared_engine: StartEngine) -> Engine:
    return start_shared_engine("prefill", "kv_producer", extra={"log_requests": True})


@pytest.fixture(scope="session")
def decode(start_shared_engine: StartEngine) -> Engine:
    """Decodes what others prefilled, and fails what it cannot load."""
    return start_shared_engine("decode", "kv_consumer", extra={"log_requests": True})


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file for `ranks.disturb_reads`, which exists after the test."""
    path = tmp_path / "gate"
    yield path
    path.touch()


@pytest.fixture(scope="session")
def vllm_source() -> Path:
    """The source distribution of the installed vLLM, which has tests, examples and benchmarks."""
    from tests.integrations.vllm.next_version.source import Source
    from tests.vllm.caches.census import installed

    version = Source(installed()).version
    try:
        return fetch("vllm", version, ROOT / ".cache" / "vllm-next")
    except SdistError as error:
        pytest.skip(f"the source of vLLM {version} was not fetched: {error}")


def _build(folder: Path) -> None:
    from examples.tiny_llama import build

    build(folder)
