"""The Grafana dashboard asks for metrics that are exported, by their labels, and for all."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram

from jpd.metrics import Metrics

SAMPLE = re.compile(r"jpd:\w+")
GROUPING = re.compile(r"by \(([^)]*)\)")
LEGEND_LABEL = re.compile(r"\{\{(\w+)\}\}")


@pytest.fixture(scope="module")
def panels(repo: Path) -> list[dict[str, Any]]:
    dashboard = json.loads((repo / "dashboards" / "grafana.json").read_text())
    found: list[dict[str, Any]] = dashboard["panels"]
    return found


def samples() -> dict[str, frozenset[str]]:
    """Every name that a query may use, with its labels."""
    found = dict[str, frozenset[str]]()
    for metric in vars(Metrics()).values():
        if isinstance(metric, Histogram):
            for suffix, extra in (("bucket", {"le"}), ("sum", set()), ("count", set())):
                found[f"{metric._name}_{suffix}"] = frozenset(metric._labelnames) | extra
        elif isinstance(metric, Counter):
            found[f"{metric._name}_total"] = frozenset(metric._labelnames)
        elif isinstance(metric, Gauge):
            found[metric._name] = frozenset(metric._labelnames)
    return found


def targets(panels: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (target["expr"], target["legendFormat"])
        for panel in panels
        for target in panel.get("targets", ())
    ]


def test_every_query_is_of_exported_names_and_their_labels(panels: list[dict[str, Any]]) -> None:
    known = samples()
    for expression, legend in targets(panels):
        names = SAMPLE.findall(expression)
        assert names, expression
        groups = {label for text in GROUPING.findall(expression) for label in text.split(", ")}
        for name in names:
            assert name in known, f"{name} of {expression} is not exported"
            assert groups <= known[name], f"{expression} groups by labels {name} has not"
            assert set(LEGEND_LABEL.findall(legend)) <= (groups or known[name]), legend
            if name.endswith(("_total", "_bucket")):
                assert expression.startswith("sum(jpd:") or f"rate({name}[" in expression


def test_every_metric_has_its_place(panels: list[dict[str, Any]]) -> None:
    shown = {name for expression, _ in targets(panels) for name in SAMPLE.findall(expression)}
    missing = {
        name for name in samples() if name not in shown and not name.endswith(("_sum", "_count"))
    }
    assert not missing


def test_panels_do_not_overlap_and_have_ids_of_their_own(panels: list[dict[str, Any]]) -> None:
    taken = set[tuple[int, int]]()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
