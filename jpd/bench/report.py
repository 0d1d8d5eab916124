"""A figure and results as a picture and as one page that needs no network: STEM.png, STEM.html.

Needs the extra `bench` (matplotlib). Called by the benchmarks that draw.
"""

import html
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jpd.bench.results import Result, machine
from jpd.errors import ConfigError, Problem

STYLE = (
    "body{font-family:sans-serif;max-width:70em;margin:2em auto}svg{max-width:100%;height:auto}"
    "td{padding:0 1em}td:nth-child(2){text-align:right}"
)


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def check_can_draw() -> None:
    """Learn it before anything is measured. Raises ConfigError without matplotlib."""
    if not can_draw():
        rule = "plots need the extra: pip install 'jpd[bench]'"
        raise ConfigError([Problem("jpd bench", "--plot", "matplotlib", rule)])


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_report(
    stem: Path, title: str, figure: Any, results: Sequence[Result], notes: Sequence[str] = ()
) -> list[Path]:
    """Both files; `notes` are paragraphs above the table. Raises ConfigError."""
    png, page = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.html")
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    try:
        figure.savefig(png, dpi=110)
        page.write_text(_page(title, drawing.getvalue(), results, notes), encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem("jpd bench", "--plot", str(stem), str(error))]) from error
    return [png, page]


def _page(title: str, drawing: str, results: Sequence[Result], notes: Sequence[str]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(result.name)}</td><td>{result.value:,.4g}</td>"
        f"<td>{html.escape(result.unit)}</td></tr>"
        for result in results
    )
    told = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    where = html.escape("; ".join(f"{key}: {value}" for key, value in machine().items()))
    svg, heading = drawing[drawing.index("<svg") :], html.escape(title)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{heading}</title>"
        f"<style>{STYLE}</style></head><body><h1>{heading}</h1>{svg}{told}<table>{rows}</table>"
        f"<p>{where}</p></body></html>\n"
    )
