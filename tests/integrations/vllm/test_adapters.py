"""Which content the adapter of a request has, by its files and by what workers report.

Needs no vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.integrations.vllm.adapter_files import AdapterContents, AdapterError
from kvferry.integrations.vllm.adapter_loads import UNKNOWN, AdapterLoad, AdapterReport
from kvferry.integrations.vllm.adapters import WAIT_SECONDS, Adapters, lora_settings
from tests.engines.steps import eventually
from tests.integrations.vllm.test_adapter_files import content, write

Make = Callable[..., Adapters]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes the adapters of an engine."""
    made: list[Adapters] = []

    def build(*, prefix_caching: bool = True, **settings: Any) -> Adapters:
        made.append(Adapters(prefix_caching=prefix_caching, **settings))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write(tmp_path / "adapter")


def asks(path: str, name: str = "r", number: int = 1, **more: Any) -> Any:
    """A request with an adapter."""
    lora = SimpleNamespace(lora_name="adapter", lora_int_id=number, lora_path=path, **more)
    return SimpleNamespace(request_id=name, lora_request=lora)


def load(path: str, number: int = 1, rank: int = 0, read: bytes | None = None) -> AdapterLoad:
    """A load of the files that are there now, unless told otherwise."""
    version, now = AdapterContents().read(path)
    return AdapterLoad(
        rank=rank,
        adapter=number,
        name="adapter",
        path=path,
        version=version,
        content=now if read is None else read,
    )


def tell(adapters: Adapters, *loads: AdapterLoad, step: int = 0) -> list[str]:
    return adapters.reported(AdapterReport(loads=loads, step=step))


def settle(adapters: Adapters, request: Any, *loads: AdapterLoad) -> Any:
    """Follow a request until it waits no longer; the workers answer with these loads."""
    adapters.follow(request)
    tell(adapters, *loads, step=adapters.next_step())
    eventually(lambda: not adapters.waits(request))
    return request


def refuses(adapters: Adapters, request: Any, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        adapters.content(request)


def test_a_request_without_an_adapter(make: Make) -> None:
    adapters, request = make(), SimpleNamespace(request_id="r", lora_request=None)
    adapters.follow(request)
    assert not adapters.waits(request)
    assert adapters.content(request) is None
    assert adapters.next_step() == 0


def test_a_request_waits_for_the_hash_and_for_the_workers(make: Make, path: str) -> None:
    adapters, request = make(), asks(path)
    adapters.follow(request)
    refuses(adapters, request, "'adapter': its content was not known when the request began")
    step = adapters.next_step()
    assert step > 0
    eventually(lambda: not adapters._is_hashing(path))
    assert adapters.waits(request)
    tell(adapters, step=step)
    assert not adapters.waits(request)
    assert adapters.content(request) == content(path)
    assert adapters.next_step() == 0


def test_an_answer_to_an_earlier_step_is_none(make: Make, path: str) -> None:
    """It does not tell of what was loaded after that step."""
    adapters, first, second = make(), asks(path, "first"), asks(path, "second")
    adapters.follow(first)
    early = adapters.next_step()
    adapters.follow(second)
    tell(adapters, step=early)
    eventually(lambda: not adapters.waits(first))
    assert adapters.waits(second)
    tell(adapters, step=adapters.next_step())
    assert not adapters.waits(second)


def test_a_known_adapter_asks_nobody(make: Make, path: str) -> None:
    adapters = make()
    settle(adapters, asks(path, "first"), load(path))
    adapters.follow(later := asks(path, "later"))
    assert not adapters.waits(later)
    assert adapters.content(later) == content(path)


def test_how_experts_are_packed_is_content(make: Make, path: str) -> None:
    adapters = make()
    plain, packed = asks(path, "plain"), asks(path, "packed", is_3d_lora_weight=True)
    for request in (plain, packed):
        settle(adapters, request)
    assert adapters.content(plain) != adapters.content(packed)


def test_how_the_engine_applies_adapters_is_content(make: Make, path: str) -> None:
    """Settings with vLLM's defaults add nothing, also in a vLLM that lacks them."""
    contents = {}
    for modules, shared in ((None, False), (["q_proj"], False), ([], False), (None, True)):
        config: Any = SimpleNamespace(target_modules=modules, enable_moe_shared_loras=shared)
        adapters = make(settings=lora_settings(config))
        settle(adapters, request := asks(path))
        contents[adapters.content(request)] = modules, shared
    assert len(contents) == 4
    assert contents[content(path)] == (None, False)
    older: Any = SimpleNamespace()
    assert lora_settings(None) == lora_settings(older) == b""


def test_the_order_of_target_modules_does_not_matter() -> None:
    one: Any = SimpleNamespace(target_modules=["q_proj", "v_proj"])
    other: Any = SimpleNamespace(target_modules=["v_proj", "q_proj", "v_proj"])
    assert lora_settings(one) == lora_settings(other) != b""


def test_loads_that_were_forgotten(
    make: Make, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter without a known load is refused, unless its number is above all forgotten ones."""
    monkeypatch.setattr("kvferry.integrations.vllm.adapters.MAX_ADAPTERS", 2)
    adapters = make()
    settle(adapters, asks(path, "first"), *(load(path, number) for number in (1, 2)))
    adapters.follow(asks(path, "used"))  # so the load of the second adapter is forgotten
    tell(adapters, load(path, 3))
    for number, known in ((1, True), (2, False), (3, True), (4, True)):
        settle(adapters, request := asks(path, str(number), number=number))
        if known:
            assert adapters.content(request) == content(path)
        else:
            refuses(adapters, request, "forgotten the load of this one: unload")
    assert adapters.content(
        settle(adapters, asks(path, "again", number=2), load(path, 2))
    ) == content(path)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_files_that_changed_after_they_were_loaded(
    make: Make, path: str, prefix_caching: bool
) -> None:
    """Loaded again they count, but not where blocks of the old weights may be cached."""
    adapters = make(prefix_caching=prefix_caching)
    settle(adapters, asks(path, "first"), load(path))
    write(Path(path), weights=b"others")
    refuses(adapters, settle(adapters, asks(path, "second")), "not those that the engine loaded")
    settle(adapters, request := asks(path, "third"), load(path))
    if prefix_caching:
        refuses(adapters, request, r"blocks of those .* from a new path")
    else:
        assert adapters.content(request) == content(path)


def test_files_that_were_replaced_by_equal_ones(make: Make, path: str) -> None:
    adapters = make()
    settle(adapters, asks(path, "first"), load(path))
    write(Path(path))
    assert adapters.content(settle(adapters, asks(path, "second"))) == content(path)


def test_files_that_change_after_they_were_hashed(make: Make, path: str) -> None:
    adapters = make()
    settle(adapters, request := asks(path), load(path))
    write(Path(path), weights=b"others")
    refuses(adapters, request, r"'adapter': .* changed after they were hashed")


def test_files_that_changed_while_they_were_loaded(make: Make, path: str) -> None:
    adapters = make()
    refuses(
        adapters,
        settle(adapters, asks(path), load(path, read=UNKNOWN)),
        "not those that the engine loaded",
    )


def test_a_path_that_is_gone(make: Make, tmp_path: Path) -> None:
    adapters = make()
    refuses(
        adapters,
        settle(adapters, asks(str(tmp_path / "gone"))),
        r"'adapter': its files .* cannot be read",
    )


def test_one_number_for_two_adapters(make: Make, path: str, tmp_path: Path) -> None:
    """vLLM computes with whichever it loaded first."""
    adapters, other = make(), write(tmp_path / "other", weights=b"others")
    settle(adapters, asks(path, "first"), load(path))
    refuses(adapters, settle(adapters, asks(other, "second")), "not those that the engine loaded")


def test_ranks_that_loaded_different_files(make: Make, path: str) -> None:
    adapters, old = make(prefix_caching=False), load(path, rank=0)
    settle(adapters, asks(path, "first"), old)
    write(Path(path), weights=b"others")
    refuses(
        adapters,
        settle(adapters, asks(path, "second"), load(path, rank=1)),
        "not those that the engine loaded",
    )


def test_another_load_during_a_request(make: Make, path: str, tmp_path: Path) -> None:
    """The request was computed with two weights; the path and its files did not change."""
    adapters, other = make(), write(tmp_path / "other", weights=b"others")
    settle(adapters, request := asks(path), load(path))
    tell(adapters, load(other))
    tell(adapters, load(path))
    refuses(adapters, request, "loaded other files for it while it computed")


@pytest.mark.parametrize("same", [True, False])
def test_a_load_in_the_last_step_of_a_request(
    make: Make, path: str, tmp_path: Path, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM tells of it after the ticket was made, so the ticket is given up if they differ."""
    adapters, other = make(), write(tmp_path / "other", weights=b"others")
    settle(adapters, request := asks(path))
    adapters.content(request)
    adapters.end("r")
    assert tell(adapters, load(path if same else other)) == ([] if same else ["r"])
    assert ("loaded with other weights" in caplog.text) == (not same)
    assert tell(adapters, load(other)) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_ticket_for_other_content_than_was_loaded(
    make: Make, path: str, tmp_path: Path, number: int
) -> None:
    """vLLM is told of it before it uses what the step has computed; nothing is remembered yet."""
    adapters, other = make(), write(tmp_path / "other", weights=b"others")
    settle(adapters, asks(path, "without a ticket"), load(path))
    settle(adapters, request := asks(path))
    adapters.content(request)
    said = AdapterReport(loads=(load(path), load(other, number)))
    assert adapters.contradicted(said) == (["r"] if number == 1 else [])
    assert adapters.contradicted(AdapterReport(loads=(load(path),))) == []
    adapters.end("r")
    assert adapters.contradicted(said) == []


def test_files_that_were_replaced_and_loaded_during_a_request(make: Make, path: str) -> None:
    """The request may have begun with the weights that were loaded before."""
    adapters = make(prefix_caching=False)
    settle(adapters, asks(path, "first"), load(path))
    write(Path(path), weights=b"others")
    settle(adapters, request := asks(path))
    tell(adapters, load(path))
    refuses(adapters, request, "loaded other files for it while it computed")


def test_a_worker_with_copies_of_the_files(make: Make, path: str, tmp_path: Path) -> None:
    """The content counts, wherever it was read."""
    adapters, copy = make(), write(tmp_path / "copy")
    settle(adapters, request := asks(path), replace(load(copy), path=path))
    assert adapters.content(request) == content(path)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_blocks_of_a_request_with_two_weights(
    make: Make, path: str, tmp_path: Path, prefix_caching: bool, ended: bool
) -> None:
    """vLLM caches them under the request's path, also if the right weights are loaded again."""
    adapters = make(prefix_caching=prefix_caching)
    other = write(tmp_path / "other", weights=b"others")
    settle(adapters, request := asks(path), load(path))
    if ended:
        adapters.content(request)
        adapters.end("r")
    tell(adapters, load(other))
    tell(adapters, load(path))
    settle(adapters, later := asks(path, "later"))
    if prefix_caching:
        refuses(adapters, later, "blocks of those in its prefix cache")
    else:
        assert adapters.content(later) == content(path)


@pytest.mark.parametrize("hashing", [True, False])
def test_waiting_has_an_end(
    make: Make, path: str, hashing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing does not hold up the caller."""
    now, gate, read = [0.0], threading.Event(), AdapterContents.read

    def wait(contents: AdapterContents, path: str) -> object:
        assert gate.wait(30)
        return read(contents, path)

    monkeypatch.setattr(AdapterContents, "read", wait)
    adapters = make(clock=lambda: now[0])
    adapters.follow(request := asks(path))
    if not hashing:
        gate.set()
        eventually(lambda: not adapters._is_hashing(path))
    assert adapters.waits(request)
    now[0] = WAIT_SECONDS
    assert not adapters.waits(request)
    reason = "files were not hashed" if hashing else "workers did not report it"
    with pytest.raises(AdapterError, match=f"{reason} within 30 s"):
        adapters.content(request)
    gate.set()


def test_files_that_could_not_be_hashed(
    make: Make, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but the requests with this adapter suffers, whatever the error."""
    adapters = make()
    with monkeypatch.context() as patched:
        patched.setattr("kvferry.integrations.vllm.adapter_files.hashlib", None)
        settle(adapters, request := asks(path))
    refuses(adapters, request, "'adapter': 'NoneType' object has no attribute 'blake2b'")
    assert adapters.content(settle(adapters, asks(path, "later"))) == content(path)


def test_a_request_that_ends_while_it_waits(make: Make, path: str) -> None:
    adapters = make()
    adapters.follow(request := asks(path))
    adapters.end("r")
    assert adapters.next_step() == 0
    assert not adapters.waits(request)
    assert tell(adapters, load(path)) == []
