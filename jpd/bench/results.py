"""What a benchmark gives: named numbers, their targets, and the machine they come from.

Every benchmark returns Results; the command line prints them as a table and writes them as JSON.
"""

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from rich.table import Table

VERSIONED = ("jpd", "jax", "jaxlib", "flax", "numpy", "grpcio")
PEERS = ("torch", "transformers", "llama-cpp-python")
"""Told where they are installed."""

Say = Callable[[str], None]
"""Hears, line by line, what a benchmark that takes minutes is doing."""


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
    for name in (*VERSIONED, *PEERS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in VERSIONED:
                versions[name] = "not installed"
    where = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    return {
        "machine": f"{where}{processor()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(["jpd", *sys.argv[1:]]),
    }


def processor(source: Path = Path("/proc/cpuinfo")) -> str:
    """What Linux says of its first CPU, or nothing."""
    try:
        found = re.search(r"^model name\s*: (.*)$", source.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return "" if found is None else f" ({found[1].strip()})"


def write_json(path: Path, results: Sequence[Result], seconds: float) -> None:
    """`seconds` is what the command took. Raises OSError."""
    listed = [result.as_json() for result in results]
    document = {**machine(), "seconds": round(seconds, 1), "results": listed}
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
        table.add_row(result.name, shown(result.value), result.unit, target, ok)
    return table


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
