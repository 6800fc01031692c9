"""What a prompt's digest depends on, and how much of it is handed over. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.core.lifecycle.prompt_digest import digest
from kvferry.integrations.vllm.cache_groups import CacheGroup
from kvferry.integrations.vllm.prompts import (
    handed_over_tokens,
    prompt_digest,
    truncate_prompt,
)
from tests.integrations.vllm.halves import facts, image, request

FULL = CacheGroup(index=0, tokens=16)
WINDOW = CacheGroup(index=1, tokens=16, window=32)


def changed(**values: Any) -> Any:
    each = request(40)
    each.__dict__.update(values)
    return each


def adapter(name: str) -> Any:
    return SimpleNamespace(lora_name=name)


def digest_of(content: bytes | None = None, **values: Any) -> bytes:
    """Of the first 30 tokens of a request with these attributes."""
    return prompt_digest(changed(**values), 30, content)


ADAPTED = {"content": b"content", "lora_request": adapter("first")}


def test_without_more_it_is_that_of_the_token_ids() -> None:
    """Engines of all builds make it alike."""
    assert prompt_digest(request(40), 30) == digest(range(30), None, [], None, None)
    assert prompt_digest(changed(prompt_token_ids=None), 30) == digest([], None, [], None, None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "\ud800"}, {"cache_salt": "\ud801"}),
        ({"lora_request": adapter("\ud800")}, {"lora_request": adapter("\ud801")}),
        ({"mm_features": [image(3)]}, {"mm_features": [image(4)]}),
        ({"mm_features": [image(3)]}, {"mm_features": [image(3, length=3)]}),
        ({"mm_features": [image(3)]}, {"mm_features": [image(3, name="another")]}),
        ({"mm_features": [image(3, name="\ud800")]}, {"mm_features": [image(3, name="\ud801")]}),
        ({"mm_features": [image(29)]}, {"mm_features": []}),
        ({"prompt_is_token_ids": [True] * 40}, {"prompt_is_token_ids": [True] * 29 + [False] * 11}),
        ({"prompt_is_token_ids": [True] * 40}, {}),
        ({"prompt_is_token_ids": [False] * 40}, {}),
        (ADAPTED, {}),
        (ADAPTED, ADAPTED | {"content": b"other content"}),
        (ADAPTED, ADAPTED | {"lora_request": adapter("second")}),
    ],
)
def test_what_makes_it_another(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest_of(**one) != digest_of(**other)
    assert digest_of(**one) == digest_of(**one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mm_features": [image(30)]}, {"mm_features": []}),
        ({"prompt_token_ids": [*range(30), 99]}, {}),
        ({"prompt_is_token_ids": [True] * 40}, {"prompt_is_token_ids": [True] * 30}),
    ],
)
def test_what_is_behind_the_tokens_does_not_count(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert digest_of(**one) == digest_of(**other)


def test_embeddings() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.arange(320.0).reshape(40, 8)
    later, earlier = rows.clone(), rows.clone()
    later[30, 0] += 1
    earlier[29, 7] += 1
    plain = prompt_digest(changed(prompt_embeds=rows), 30)
    assert plain == prompt_digest(changed(prompt_embeds=later), 30)
    others = [
        prompt_digest(request(40), 30),
        prompt_digest(changed(prompt_embeds=earlier), 30),
        prompt_digest(changed(prompt_embeds=rows.to(torch.bfloat16)), 30),
        prompt_digest(changed(prompt_embeds=rows.view(torch.int32)), 30),
        prompt_digest(changed(prompt_embeds=rows.reshape(80, 4)), 60),
    ]
    assert len({plain, *others}) == 1 + len(others)
    assert plain == prompt_digest(changed(prompt_embeds=rows.t().contiguous().t()), 30)


@pytest.mark.parametrize(
    ("groups", "lookahead", "left"),
    [
        ([FULL], 0, 0),
        ([FULL], 1, 0),
        ([FULL], 3, 2),
        ([FULL, WINDOW], 0, 1),
        ([FULL, WINDOW], 2, 1),
        ([FULL, WINDOW], 3, 2),
        ([], 0, 0),
    ],
)
def test_what_is_left_to_decode(groups: list[CacheGroup], lookahead: int, left: int) -> None:
    assert facts(groups, lookahead=lookahead).backoff == left


@pytest.mark.parametrize(
    ("tokens", "tail", "over"), [(40, 0, 40), (40, 2, 38), (3, 2, 1), (2, 2, 2)]
)
def test_what_is_handed_over(tokens: int, tail: int, over: int) -> None:
    assert handed_over_tokens(request(tokens), tail) == over


def test_a_shorter_prompt_is_short_everywhere() -> None:
    each = changed(prompt_embeds=[[0.0]] * 40, prompt_is_token_ids=[True] * 40)
    truncate_prompt(each, 2)
    lists = (each.prompt_token_ids, each.prompt_embeds, each.prompt_is_token_ids)
    assert [len(rows) for rows in (*lists, each._all_token_ids)] == [38] * 4
    assert (each.num_prompt_tokens, each.max_tokens) == (38, 1)
    assert each.prompt_token_ids == list(range(38))
