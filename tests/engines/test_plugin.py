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

    def test_foreign_handshake_is_ignored(self, reference: Engine) -> None:
        """MultiConnector gives all of its children what the first one published."""
        reference.run(inside.serve_foreign_handshake, str(reference.model))

    def test_an_unwell_engine_steps_on_for_a_while(self, reference: Engine) -> None:
        """Not for ever: some things never get well, and vLLM ends only when it has no work."""
        assert reference.run(inside.steps_while_unwell, str(reference.model)) == {
            "well": False,
            "ill": True,
            "still ill": True,
            "ill of more": True,
            "still ill of more": True,
            "ill for long": False,
            "ill of something else": True,
            "well again": False,
        }

    def test_an_unwell_engine_does_not_spin(self, reference: Engine) -> None:
        assert reference.run(inside.waits_in_a_step) == {
            "well": False,
            "loads": True,
            "holds pages": True,
            "unwell": True,
            "unwell and busy": False,
        }

    def test_ranks_report_what_changed_and_what_was_asked_for(self, reference: Engine) -> None:
        reports = reference.run(inside.reports_of_ranks)
        [silence] = reports["asked"][0]
        assert silence.age == 4.0
        del reports["asked"][0], reports["asked"][1]
        assert reports == {
            "nothing": None,
            "asked": {},
            "ill": {1: ("it burns",)},
            "asked again": ({}, {0: 1, 1: 1}),
        }

    def test_figures_add_up(self, reference: Engine) -> None:
        """As vLLM adds them over ranks and steps, and rebuilds them in the process that logs."""
        assert reference.run(inside.added_figures) == {
            "loads": 2,
            "tokens": 18,
            "MB": 0.008,
            "waited ms median": 0.0,
            "waited ms longest": 0.0,
            "read ms median": 0.0,
            "read ms longest": 0.0,
            "refused tickets": 1,
            "peers down": 2,
        }
