"""Writes the Grafana dashboards, the alert rules and the runbook from deploy/monitoring.yaml.

    python tools/make_monitoring.py [--check]

Names of metrics are compared with those that tidegate exports, so that a renamed metric is noticed here.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from prometheus_client import CollectorRegistry

from tidegate import Limiter
from tidegate.budget import TaskBudget
from tidegate.budget.prometheus import BudgetCollector
from tidegate.observe.prometheus import PrometheusObserver, StoreCollector
from tidegate.outbound._quota.money_metrics import MONEY_METRICS
from tidegate.service._dashboard.run_panel import QUOTA, USED
from tidegate.service._http.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "deploy" / "monitoring.yaml"
METRIC = re.compile(r"\b(?:tidegate|rate_limit)_[a-z_]+")
SUFFIXES = re.compile(r"_(bucket|sum|count)$")
LINE_LENGTH = 120
COLUMNS, WIDTH, HEIGHT = 24, 12, 8
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class MetricInfo(NamedTuple):
    """A metric, as the code exports it."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]


def metric_families() -> dict[str, list[MetricInfo]]:
    """Return all metrics, by what exports them. The code exports them here, after an allowed and a denied call."""
    library, budgets = CollectorRegistry(), CollectorRegistry()
    with Limiter("1/1h", observer=PrometheusObserver(library)) as limiter, TemporaryDirectory() as folder:
        limiter.try_acquire("key")
        limiter.try_acquire("key")
        for metric in ("tidegate_store", "tidegate_outbound", "tidegate_swarm"):
            StoreCollector(limiter.store, library, metric=metric)
        with TaskBudget(Path(folder) / "budget.db", per_day=1) as budget:
            budgets.register(BudgetCollector(budget))
            found = {
                "Service": [MetricInfo(*metric[:4]) for metric in METRICS.values()],
                "Programs that use the library": list(_exported(library)),
                "Task budgets": list(_exported(budgets)),
                "Runs of agents, of a service": [
                    MetricInfo(*USED, ("run", "node", "id", "unit")),
                    MetricInfo(*QUOTA, ("run", "node", "id", "limit", "unit")),
                ],
                "Money, of a service and an egress gateway": [
                    MetricInfo(name, *rest) for name, rest in MONEY_METRICS.items()
                ],
            }
    try:
        from tidegate.egress._stats import COUNTERS, FIRST_BYTE, LABELS, WAITED  # noqa: PLC0415 - needs aiohttp
    except ImportError:
        return found
    gateway = (*((name, kind, text) for name, kind, text, _ in COUNTERS), WAITED, FIRST_BYTE)
    return found | {"Egress gateway": [MetricInfo(*each, LABELS) for each in gateway]}


def _exported(registry: CollectorRegistry) -> Iterator[MetricInfo]:
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        yield MetricInfo(name, family.type, family.documentation, tuple(labels))


def known_metrics() -> set[str]:
    """Return the names of all metrics, as the code exports them."""
    return {family.name for families in metric_families().values() for family in families}


def check_metrics(expression: str, known: set[str], place: str) -> str:
    """Return a query whose metrics are all known."""
    for name in METRIC.findall(expression):
        if name not in known and SUFFIXES.sub("", name) not in known:
            raise SystemExit(f"{SOURCE.name}: {place}: tidegate exports no metric {name!r}")
    return expression


def make_dashboard(name: str, part: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    panels = []
    for number, panel in enumerate(part["panels"]):
        targets = [
            {
                "refId": chr(65 + place),
                "expr": check_metrics(query, known, f"{name}: {panel['title']}"),
                "legendFormat": legend,
            }
            for place, (legend, query) in enumerate(panel["queries"].items())
        ]
        x, y = number * WIDTH % COLUMNS, number * WIDTH // COLUMNS * HEIGHT
        panels.append(
            {
                "id": number + 1,
                "title": panel["title"],
                "type": panel.get("type", "timeseries"),
                "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
                "datasource": DATA_SOURCE,
                "targets": targets,
                "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
            }
        )
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    ]
    if any("$job" in target["expr"] for panel in panels for target in panel["targets"]):
        job = {"name": "job", "type": "query", "query": "label_values(up, job)", "datasource": DATA_SOURCE}
        variables.append({**job, "includeAll": True, "allValue": ".+", "current": {"text": "All", "value": "$__all"}})
    return {
        "title": part["title"],
        "uid": f"tidegate-{name}",
        "tags": ["tidegate"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def make_rules(name: str, part: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the recording and alert rules of a group."""
    rules: list[dict[str, Any]] = [
        {"record": record, "expr": check_metrics(query, known, record)}
        for record, query in part.get("rules", {}).items()
    ]
    for alert, fields in part["alerts"].items():
        rules.append(
            {
                "alert": alert,
                "expr": check_metrics(fields["when"], known, alert),
                "for": fields["for"],
                "labels": {"severity": fields["severity"]},
                "annotations": {"summary": fields["summary"], "runbook": f"docs/howto/runbook.md#{alert.lower()}"},
            }
        )
    return {"groups": [{"name": f"tidegate-{name}", "rules": rules}]}


def make_runbook(parts: dict[str, Any]) -> str:
    """Return the page that explains every alert."""
    lines = ["# Runbook", "", "This page explains each alert of `deploy/prometheus/rules`. It is generated from"]
    lines += ["`deploy/monitoring.yaml` (`make monitoring`).", ""]
    for part in parts.values():
        lines += [f"## {part['title']}", ""]
        for alert, fields in part["alerts"].items():
            lines += [f"### {alert}", "", f"**Severity:** {fields['severity']}, after {fields['for']}.", ""]
            for title, key in (("What it means", "means"), ("What to check", "look"), ("What to do", "do")):
                lines += [*wrap(f"**{title}.** {fields[key].strip()}", LINE_LENGTH, break_on_hyphens=False), ""]
    return "\n".join(lines).rstrip() + "\n"


def make_files() -> Iterator[tuple[Path, str]]:
    """Yield the path and the content of every file."""
    parts = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    known = known_metrics()
    for name, part in parts.items():
        dashboard = make_dashboard(name, part, known)
        yield ROOT / "deploy" / "grafana" / "dashboards" / f"{name}.json", json.dumps(dashboard, indent=1) + "\n"
        rules = yaml.safe_dump(make_rules(name, part, known), sort_keys=False, width=110, allow_unicode=True)
        head = f"# Generated from {SOURCE.relative_to(ROOT)} by {Path(__file__).relative_to(ROOT)}.\n"
        yield ROOT / "deploy" / "prometheus" / "rules" / f"{name}.rules.yml", head + rules
    yield ROOT / "docs" / "howto" / "runbook.md", make_runbook(parts)


def main() -> int:
    """Write the files; with --check, list those that differ."""
    check, different = "--check" in sys.argv, []
    for path, text in make_files():
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            different.append(str(path.relative_to(ROOT)))
        elif not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if different:
        print("run `make monitoring`, which changes:", *different)
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
