"""The plugin and the connector's hooks in the process of an engine."""

from __future__ import annotations

import pytest

from tests.engines import inside
from tests.engines.engines import Engine


@pytest.mark.timeout(300)
class TestInVllm:
    def test_plugin_registers_once(self, reference: Engine) -> None:
        assert reference.run(inside.register_twice) == "kvferry.integrations.vllm.connector"

    def test_plugin_does_not_take_a_name_that_is_taken(self, reference: Engine) -> None:
        assert "uninstall its package" in reference.run(inside.register_over_another)

    def test_worker_without_caches(self, reference: Engine) -> None:
        """vLLM may drive a worker's hooks before, or without, any cache; foreign metadata too."""
        reference.run(inside.drive_worker_without_caches, str(reference.model))

    @pytest.mark.parametrize("drafts", [False, True])
    def test_loads_begin_before_the_model_runs(self, reference: Engine, drafts: bool) -> None:
        """And what is over is asked for after it, before a drafter runs."""
        happened = reference.run(inside.order_of_a_step, str(reference.model), drafts)
        assert happened == ["messages", "model", "results", *["drafter"] * drafts]
