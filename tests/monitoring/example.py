"""The files of ``examples/monitoring``, and the metrics and labels that their expressions use."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.metrics import MetricKind
from kvferry.integrations.vllm.scheduler_metrics import METRICS

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
RULES = FOLDER / "kvferry.rules.yml"
RULE_TESTS = FOLDER / "kvferry.rules.test.yml"
CONFIG = FOLDER / "prometheus.yml"
DASHBOARD = FOLDER / "kvferry-dashboard.json"

TARGET_LABELS = {"instance", "job", "role"}
"""The labels that Prometheus gives all metrics of a target, by ``prometheus.yml``."""
VLLM_LABELS = {"engine", "model_name"}  # the labels that vLLM gives all metrics of an engine
VLLM_METRICS = {
    "vllm:kv_cache_usage_perc": set[str](),
    "vllm:num_requests_running": set[str](),
    "vllm:num_requests_waiting": set[str](),
    "vllm:prompt_tokens_by_source_total": {"source"},
    "vllm:time_to_first_token_seconds_bucket": {"le"},
}
"""vLLM's own metrics that are used, and their labels."""
SUFFIXES = {MetricKind.COUNTER: "_total", MetricKind.GAUGE: "", MetricKind.HISTOGRAM: "_bucket"}


def program(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``; skip the test where it is missing."""
    unpacked = FOLDER.parents[1] / ".cache" / "prometheus" / "usr" / "bin"
    found = shutil.which(name) or shutil.which(name, path=str(unpacked))
    if found is None:
        pytest.skip(f"{name} is not installed; make prometheus gets it from Debian's package")
    return found


def yaml(path: Path) -> Any:
    """Return what a YAML file has; skip the test where PyYAML is not installed."""
    return pytest.importorskip("yaml").safe_load(path.read_text())


def rules() -> list[dict[str, Any]]:
    """Return the alerts."""
    return [rule for group in yaml(RULES)["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard, without the headings of its rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def panel_expressions() -> Iterator[tuple[str, str, str]]:
    """Yield title, expression and legend of each of the dashboard's queries."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def expressions() -> list[str]:
    """Return all expressions of rules and dashboard."""
    alerts: list[str] = [rule["expr"] for rule in rules()]
    return [*alerts, *(expression for _, expression, _ in panel_expressions())]


def own() -> dict[str, set[str]]:
    """Return the labels of each of kvferry's metrics that an expression may use, by its name."""
    return {
        f"vllm:kvferry_{metric.name}{SUFFIXES[metric.kind]}": set(metric.labels)
        | ({"le"} if metric.kind is MetricKind.HISTOGRAM else set())
        for metric in METRICS
    }


def defined() -> dict[str, set[str]]:
    """Return the labels of every metric that an expression may use, by the metric's name."""
    of_engines = own() | VLLM_METRICS
    vllm = {name: labels | VLLM_LABELS for name, labels in of_engines.items()}
    return {name: labels | TARGET_LABELS for name, labels in (vllm | {"up": set()}).items()}


def names(expression: str) -> set[str]:
    """Return the metrics of an expression."""
    return set(re.findall(r"\bvllm:\w+|\bup\b", expression))


def matched_labels(expression: str) -> Iterator[tuple[str, str]]:
    """Yield each label by which an expression selects series, after the metric's name."""
    for name, matchers in re.findall(r"(\bvllm:\w+|\bup)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', matchers)):
            yield name, label


def grouping_labels(expression: str) -> set[str]:
    """Return the labels by which an expression groups."""
    found = re.findall(r"\b(?:by|on|ignoring|without|group_left)\s*\(([^)]*)\)", expression)
    return {label.strip() for labels in found for label in labels.split(",") if label.strip()}
