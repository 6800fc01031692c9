"""The keys of vLLM's ``KVTransferConfig``."""

from __future__ import annotations

from dataclasses import fields

from kvferry.integrations.vllm.transfer_config import KEYS, OLD_KEYS


def test_keys_are_those_of_vllm() -> None:
    from vllm.config import KVTransferConfig

    assert {field.name for field in fields(KVTransferConfig)} == set(KEYS)
    assert not set(KEYS) & set(OLD_KEYS)
