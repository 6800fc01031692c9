"""Which content the adapter of a request has, by its files and by what workers report.

Needs no vLLM.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm import adapter_checks as module
from kvferry.integrations.vllm.adapter_checks import WAIT_SECONDS, Adapters, lora_settings
from kvferry.integrations.vllm.adapter_hashes import (
    UNKNOWN,
    AdapterContents,
    AdapterError,
    AdapterLoad,
    AdapterReport,
)
from tests.integrations.vllm.test_adapter_hashes import content, write
from tests.waiting import eventually

NOT_LOADED = "not those that the engine loaded"
CACHED = r"blocks of those .* from a new path"


class Engine:
    """The adapters of an engine, and an adapter ``path`` beside one with other weights."""

    def __init__(self, folder: Path) -> None:
        self.path = write(folder / "adapter")
        self.other = write(folder / "other", weights=b"others")
        self.made: list[Adapters] = []
        self.start()

    def start(self, *, prefix_caching: bool = True, **settings: Any) -> None:
        self.adapters = Adapters(prefix_caching=prefix_caching, **settings)
        self.made.append(self.adapters)

    def request(self, name: str = "r", number: int = 1, path: str = "", **more: Any) -> Any:
        path = path or self.path
        lora = SimpleNamespace(lora_name="adapter", lora_int_id=number, lora_path=path, **more)
        return SimpleNamespace(request_id=name, lora_request=lora)

    def load(self, path: str = "", number: int = 1, rank: int = 0) -> AdapterLoad:
        """A load of the files that are there now."""
        path = path or self.path
        version, now = AdapterContents().read(path)
        named: dict[str, Any] = {"adapter": number, "name": "adapter", "path": path}
        return AdapterLoad(rank=rank, version=version, content=now, **named)

    def tell(self, *loads: AdapterLoad, step: int = 0) -> list[str]:
        return self.adapters.reported(AdapterReport(loads=loads, step=step))

    def settle(self, *loads: AdapterLoad, **request: Any) -> Any:
        """Follow a request until it waits no longer; the workers answer with these loads."""
        each = self.request(**request)
        self.adapters.follow(each)
        self.tell(*loads, step=self.adapters.next_step())
        eventually(lambda: not self.adapters.waits(each))
        return each

    def play(self, story: str) -> Any:
        """Let things happen one after the other; the last request."""
        last: Any = None
        for number, what in enumerate(story.split(", ")):
            name = str(number)
            if what == "change":
                write(Path(self.path), weights=b"others")
            elif what == "write again":
                write(Path(self.path))
            elif what == "report":
                self.tell(self.load())
            elif what == "report other":
                self.tell(self.load(self.other))
            elif what == "end":
                self.adapters.content(last)
                self.adapters.end(last.request_id)
            elif what.startswith("ask"):
                path = {"ask other": self.other, "ask gone": f"{self.path}/gone"}.get(what, "")
                last = self.settle(name=name, path=path)
            elif what == "load a copy":
                copy = self.load(write(Path(f"{self.path}-copy")))
                last = self.settle(replace(copy, path=self.path), name=name)
            else:
                load = self.load(rank=int(what == "load on rank 1"))
                if what == "load while files change":
                    load = replace(load, content=UNKNOWN)
                last = self.settle(load, name=name)
        return last

    def check(self, request: Any, refusal: str = "") -> None:
        """Expect the content of the files that are there now, or a refusal."""
        if not refusal:
            assert self.adapters.content(request) == content(request.lora_request.lora_path)
            return
        with pytest.raises(AdapterError, match=f"'adapter': .*{refusal}"):
            self.adapters.content(request)


def hashed(adapters: Adapters) -> None:
    """Wait until the files of all requests are hashed."""
    hashing = [each.hashing for each in adapters._followers.values() if each.hashing]
    eventually(lambda: all(each.done() for each in hashing))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    for each in made.made:
        each.close()


def test_a_request_without_an_adapter(engine: Engine) -> None:
    request: Any = SimpleNamespace(request_id="r", lora_request=None)
    engine.adapters.follow(request)
    assert not engine.adapters.waits(request)
    assert engine.adapters.content(request) is None
    assert engine.adapters.next_step() == 0


def test_a_request_waits_for_the_hash_and_for_a_step_that_was_built_after_it_came(
    engine: Engine,
) -> None:
    adapters, first, second = engine.adapters, engine.request("first"), engine.request("second")
    adapters.follow(first)
    engine.check(first, "its content was not known when the request began")
    early = adapters.next_step()
    assert early > 0
    adapters.follow(second)
    hashed(adapters)
    assert adapters.waits(first)
    engine.tell(step=early)
    assert not adapters.waits(first)
    assert adapters.waits(second)
    engine.check(first)
    engine.tell(step=adapters.next_step())
    assert not adapters.waits(second)
    assert adapters.next_step() == 0


def test_a_known_adapter_asks_nobody(engine: Engine) -> None:
    engine.settle(engine.load(), name="first")
    engine.adapters.follow(later := engine.request("later"))
    assert not engine.adapters.waits(later)
    engine.check(later)


def test_an_adapter_whose_files_are_gone_asks_nobody(engine: Engine) -> None:
    engine.settle(engine.load(), name="first")
    shutil.rmtree(engine.path)
    engine.adapters.follow(later := engine.request("later"))
    eventually(lambda: not engine.adapters.waits(later))
    engine.check(later, "cannot be read")


def test_how_the_engine_applies_adapters_is_content(engine: Engine) -> None:
    """Settings with vLLM's defaults add nothing, also in a vLLM that lacks them."""
    contents = {engine.adapters.content(engine.settle(is_3d_lora_weight=True))}
    for modules, shared in ((None, False), (["q_proj"], False), ([], False), (None, True)):
        config: Any = SimpleNamespace(target_modules=modules, enable_moe_shared_loras=shared)
        engine.start(settings=lora_settings(config))
        contents.add(engine.adapters.content(engine.settle()))
    assert len(contents) == 5
    assert content(engine.path) in contents
    one, other = (SimpleNamespace(target_modules=each) for each in (["a", "b"], ["b", "a", "a"]))
    assert lora_settings(one) == lora_settings(other)
    assert lora_settings(None) == lora_settings(SimpleNamespace()) == b""


def test_the_load_of_an_adapter_that_may_be_forgotten_hands_nothing_over(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ADAPTERS", 2)
    engine.start()
    engine.tell(*(engine.load(number=number) for number in (1, 3)))
    engine.adapters.follow(engine.request("used"))  # so the load of the second one is forgotten
    engine.tell(engine.load(number=2))
    for number, refusal in ((1, ""), (3, "forgotten .* unload"), (2, ""), (4, "")):
        engine.check(engine.settle(name=str(number), number=number), refusal)
    engine.check(engine.settle(engine.load(number=3), name="again", number=3))


@pytest.mark.parametrize(
    ("story", "refusal", "with_prefix_caching"),
    [
        ("load, change, ask", NOT_LOADED, NOT_LOADED),
        ("load, change, ask, load", "", CACHED),
        ("load, write again, ask", "", ""),
        ("load, change", "changed after they were hashed", None),
        ("load while files change", NOT_LOADED, NOT_LOADED),
        ("ask gone", "its files .* cannot be read", None),
        ("load, ask other", NOT_LOADED, NOT_LOADED),  # it has the number of another adapter
        ("load, change, load on rank 1", NOT_LOADED, NOT_LOADED),
        ("load a copy", "", ""),  # the content counts, wherever it was read
        # While a request runs, though its path and files do not change.
        ("load, report other, report", NOT_LOADED, NOT_LOADED),
        # It may have begun with the weights that were loaded before.
        ("load, change, ask, report", NOT_LOADED, NOT_LOADED),
        # vLLM cached blocks of other weights under the path.
        ("load, report other, report, ask", "", CACHED),
        ("load, end, report other, report, ask", "", CACHED),
    ],
)
def test_what_the_engine_computes_with_has_to_be_the_current_files(
    engine: Engine, story: str, refusal: str, with_prefix_caching: str | None
) -> None:
    """With prefix caching, neither may blocks of other weights be cached under the path."""
    if with_prefix_caching is not None:
        engine.check(engine.play(story), with_prefix_caching)
        write(Path(engine.path))
    engine.start(prefix_caching=False)
    engine.check(engine.play(story), refusal)


@pytest.mark.parametrize("same", [True, False])
def test_a_load_in_the_last_step_of_a_request(
    engine: Engine, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM tells of it after the ticket was made, so the ticket is given up if they differ."""
    engine.check(engine.settle())
    engine.adapters.end("r")
    load = engine.load() if same else engine.load(engine.other)
    assert engine.tell(load) == ([] if same else ["r"])
    assert ("loaded with other weights" in caplog.text) == (not same)
    assert engine.tell(engine.load(engine.other)) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_ticket_for_other_content_than_was_loaded(engine: Engine, number: int) -> None:
    """vLLM is told of it before it uses what the step has computed; nothing is remembered yet."""
    engine.settle(engine.load(), name="without a ticket")
    engine.check(engine.settle())
    said = AdapterReport(loads=(engine.load(), engine.load(engine.other, number)))
    assert engine.adapters.contradicted(said) == (["r"] if number == 1 else [])
    assert engine.adapters.contradicted(AdapterReport(loads=(engine.load(),))) == []
    engine.adapters.end("r")
    assert engine.adapters.contradicted(said) == []


@pytest.mark.parametrize("hashing", [True, False])
def test_waiting_has_an_end(engine: Engine, hashing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing does not hold up the caller."""
    now, gate, read = [0.0], threading.Event(), AdapterContents.read

    def wait(contents: AdapterContents, path: str) -> object:
        assert gate.wait(30)
        return read(contents, path)

    monkeypatch.setattr(AdapterContents, "read", wait)
    engine.start(clock=lambda: now[0])
    engine.adapters.follow(request := engine.request())
    if not hashing:
        gate.set()
        hashed(engine.adapters)
    assert engine.adapters.waits(request)
    now[0] = WAIT_SECONDS
    assert not engine.adapters.waits(request)
    engine.check(request, "not hashed, or no load reported, within 30 s")
    gate.set()


def test_files_that_could_not_be_hashed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but the requests with this adapter suffers, whatever the error."""
    with monkeypatch.context() as patched:
        patched.setattr("kvferry.integrations.vllm.adapter_hashes.hashlib", None)
        request = engine.settle()
    engine.check(request, "'NoneType' object has no attribute 'blake2b'")
    engine.check(engine.settle(name="later"))
