"""The rules, the dashboard and the scrape configuration of ``examples/monitoring`` are sound."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from docs.tools.links import anchors
from kvferry.integrations.vllm.scheduler_metrics import METRICS
from tests.monitoring import example

ROOT = Path(__file__).parents[2]
NOT_SHOWN = {"ignored_releases"}
"""Metrics that are in no panel and no rule, since nothing follows from them."""


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool in the folder of the example; skip the test where it is not installed."""
    command = [example.program("promtool"), *map(str, arguments)]
    return subprocess.run(
        command, cwd=example.FOLDER, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", example.CONFIG.name),
        ("check", "rules", example.RULES.name),
        ("test", "rules", example.RULE_TESTS.name),
    ],
    ids=" ".join,
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    result = promtool(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_panel_asks_what_prometheus_understands(tmp_path: Path) -> None:
    """As rules, which promtool checks."""
    rules = [
        {"record": f"panel_{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, (_, expression, _) in enumerate(example.panel_expressions())
    ]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    result = promtool("check", "rules", file)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tested_to_fire_and_not_to_fire() -> None:
    tested = [
        case
        for group in example.yaml(example.RULE_TESTS)["tests"]
        for case in group["alert_rule_test"]
    ]
    alerts = {rule["alert"] for rule in example.rules()}
    assert {case["alertname"] for case in tested if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in tested if not case["exp_alerts"]} == alerts


def test_every_alert_has_a_name_and_a_section_of_the_documentation() -> None:
    alerts = [rule["alert"] for rule in example.rules()]
    assert len(alerts) == len(set(alerts))
    for rule in example.rules():
        assert re.fullmatch(r"KVFerry[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "runbook"}
        page, anchor = rule["annotations"]["runbook"].split("#")
        assert anchor in anchors((ROOT / page).read_text()), rule["alert"]


def test_every_metric_and_label_exists() -> None:
    defined = example.defined()
    for expression in example.expressions():
        used = example.names(expression)
        assert used, expression
        assert used <= set(defined), expression
        for name, label in example.matched_labels(expression):
            assert label in defined[name], (label, expression)
        known = set.union(*(defined[name] for name in used))
        assert example.grouping_labels(expression) <= known, expression


def test_every_label_of_a_legend_and_an_annotation_is_in_the_result() -> None:
    for title, expression, legend in example.panel_expressions():
        labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert labels <= example.grouping_labels(expression) - {"le"}, title
        assert legend, title
    for rule in example.rules():
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        known = example.grouping_labels(rule["expr"])
        assert labels <= (known or example.TARGET_LABELS), rule["alert"]


def test_every_metric_is_used() -> None:
    used = set.union(*map(example.names, example.expressions()))
    wanted = {f"vllm:kvferry_{one.name}" for one in METRICS if one.name not in NOT_SHOWN}
    assert wanted <= {re.sub(r"_(total|bucket)$", "", name) for name in used}


def test_every_panel_and_alert_is_explained() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [panel["title"] for panel in example.panels() if panel["title"] not in page] == []
    assert [rule["alert"] for rule in example.rules() if rule["alert"] not in page] == []
