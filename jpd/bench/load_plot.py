"""Pictures of loads: how TTFT, TPOT and gaps are distributed, and how many met their targets.

Called by the benchmarks `serve` and `compare`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jpd.bench.goodput import SHARE, Goodput
from jpd.bench.latency import MEASURES, Outcome
from jpd.bench.report import new_figure


def draw_served(name: str, outcomes: Sequence[Outcome], goodput: Goodput) -> Any:
    """A panel a measure, and one of the search for the goodput."""
    figure = new_figure(12, 3.2)
    panels = figure.subplots(1, len(MEASURES) + 1)
    _draw_measures(panels, {name: outcomes})
    probes = sorted(goodput.probes, key=lambda probe: probe.rate)
    panel = panels[-1]
    panel.plot([p.rate for p in probes], [100 * p.attainment for p in probes], "o-")
    panel.axhline(100 * SHARE, color="0.6", linestyle="--")
    if goodput.rate:
        panel.axvline(goodput.rate, color="tab:green")
    panel.set_xlabel("requests/s; green: goodput")
    panel.set_ylabel("% that met both targets")
    panel.set_ylim(0, 105)
    return figure


def draw_compared(shapes: Mapping[str, Mapping[str, Sequence[Outcome]]]) -> Any:
    """A row a shape of load, a curve a mode."""
    figure = new_figure(12, 2.9 * len(shapes))
    rows = figure.subplots(len(shapes), len(MEASURES), squeeze=False)
    for panels, (shape, modes) in zip(rows, shapes.items(), strict=True):
        _draw_measures(panels, modes)
        panels[0].set_title(shape, loc="left")
    rows[0][0].legend(fontsize="small")
    return figure


def _draw_measures(panels: Sequence[Any], loads: Mapping[str, Sequence[Outcome]]) -> None:
    """The share of all below each value."""
    for panel, (measure, values_of) in zip(panels, MEASURES.items(), strict=False):
        for label, outcomes in loads.items():
            values = sorted(1000 * value for value in values_of(outcomes))
            shares = [100 * (place + 1) / len(values) for place in range(len(values))]
            panel.step(values, shares, where="post", label=label)
        panel.set_xscale("log")
        panel.set_xlabel(f"{measure}, ms")
        panel.set_ylabel("% at most")
