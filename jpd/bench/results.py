"""What a benchmark gives: named numbers, their targets, and the machine they come from.

Every benchmark returns Results; the command line prints them as a table and writes them as JSON.
"""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from rich.table import Table

VERSIONED = ("jpd", "jax", "jaxlib", "flax", "numpy", "grpcio")


@dataclass(frozen=True, slots=True)
class Result:
    """One number. `target` None: nothing is promised. `at_most`: smaller is better."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = True

    @property
    def ok(self) -> bool:
        if self.target is None:
            return True
        return self.value <= self.target if self.at_most else self.value >= self.target

    def as_json(self) -> dict[str, object]:
        values = asdict(self)
        del values["at_most"]
        return {**values, "ok": self.ok}


def machine() -> dict[str, object]:
    """Where the numbers come from."""
    versions = {}
    for name in VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(sys.argv),
    }


def write_json(path: Path, results: Sequence[Result]) -> None:
    document = {**machine(), "results": [result.as_json() for result in results]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def results_table(title: str, results: Sequence[Result]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("target", justify="right")
    table.add_column("ok")
    for result in results:
        sign = "<=" if result.at_most else ">="
        target = "" if result.target is None else f"{sign} {result.target:g}"
        ok = "" if result.target is None else ("yes" if result.ok else "NO")
        shown = f"{result.value:,.0f}" if result.value >= 1000 else f"{result.value:.4g}"
        table.add_row(result.name, shown, result.unit, target, ok)
    return table
