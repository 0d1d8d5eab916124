"""The picture of `jpd bench interference`: every gap over time, a panel a mode. PNG and HTML.

Needs the extra `bench` (matplotlib). Called by the command line.
"""

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jpd.bench.interference import PROMPT_TOKENS, Gaps
from jpd.bench.results import Result, machine
from jpd.errors import ConfigError, Problem

STYLE = "body{font-family:sans-serif;max-width:70em;margin:2em auto}td{padding:0 1em}"


def write_plots(stem: Path, gaps: Sequence[Gaps], results: Sequence[Result]) -> list[Path]:
    """Write `stem`.png and `stem`.html. Raises ConfigError without matplotlib, OSError."""
    figure = _figure(gaps)
    png, page = stem.with_suffix(".png"), stem.with_suffix(".html")
    figure.savefig(png, dpi=120)
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    page.write_text(_page(drawing.getvalue(), results), encoding="utf-8")
    return [png, page]


def _figure(gaps: Sequence[Gaps]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        rule = "plots need the extra: pip install 'jpd[bench]'"
        raise ConfigError([Problem("jpd bench", "--plot", "matplotlib", rule)]) from error
    figure = Figure(figsize=(10, 3 * len(gaps)), layout="constrained")
    panels = figure.subplots(len(gaps), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, mode in zip(panels, gaps, strict=True):
        for found, colour, label in (
            (mode.alone, "tab:blue", "streams alone"),
            (mode.loaded, "tab:orange", f"while prompts of {PROMPT_TOKENS:,} tokens arrive"),
        ):
            times, seconds = zip(*found, strict=True)
            milliseconds = [second * 1000 for second in seconds]
            panel.plot(times, milliseconds, ".", markersize=3, color=colour, label=label)
        for arrival in mode.prompts:
            panel.axvline(arrival, color="0.85", linewidth=0.8, zorder=0)
        panel.set_yscale("log")
        panel.set_ylabel("gap, ms")
        panel.set_title(mode.mode, loc="left")
        panel.legend(loc="upper left", fontsize="small")
    panels[-1].set_xlabel("seconds; grey: a long prompt has its first token")
    return figure


def _page(drawing: str, results: Sequence[Result]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(result.name)}</td><td>{result.value:,.4g}</td>"
        f"<td>{html.escape(result.unit)}</td></tr>"
        for result in results
    )
    where = html.escape("; ".join(f"{key}: {value}" for key, value in machine().items()))
    svg = drawing[drawing.index("<svg") :]
    title = "Gaps between tokens while long prompts arrive"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{svg}<table>{rows}</table>"
        f"<p>{where}</p></body></html>\n"
    )
