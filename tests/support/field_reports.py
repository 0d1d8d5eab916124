"""Which tests show that a known fault is survived, and the document that says so.

A test names reports by its own name (`test_a04_a12_...`) or by a marker with their ids. What each
report is about stands in `tests/field_reports.toml`. `python -m tests.support.field_reports` writes
`docs/field_reports.md`; `tests/test_field_reports.py` holds all three together.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPORTS_FILE = ROOT / "tests" / "field_reports.toml"
DOCUMENT = ROOT / "docs" / "field_reports.md"
MARKER = "field_report"
IDS_IN_NAME = re.compile(r"test((?:_[a-h]\d\d)+)_")

AREAS = {
    "A": "Transfer of KV, and who owns its pages",
    "B": "Routing, lines, affinity",
    "C": "Failure and recovery",
    "D": "Numbers and correctness",
    "E": "Doors",
    "F": "Checkpoints, tokenizers, configuration",
    "G": "Speed, and who disturbs whom",
    "H": "Memory and long runs",
}
HEAD = """# Faults that other servers had

What users of other servers have reported, and what happens here. Written by `make field-reports`
from the tests and `tests/field_reports.toml`; a test fails when it is not as they say.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """One fault of another server: of what kind, and what happens here."""

    kind: str
    outcome: str = ""
    cannot_arise: str = ""  # why no test can show it


@dataclass(frozen=True, slots=True)
class Shown:
    """A test, and the report that it shows."""

    report: str
    file: str  # below tests/
    test: str


def read_reports(path: Path = REPORTS_FILE) -> dict[str, Report]:
    """By id. Raises TypeError for a key that is not there."""
    return {name: Report(**table) for name, table in tomllib.loads(path.read_text()).items()}


def shown_by_tests(folder: Path = ROOT / "tests") -> list[Shown]:
    """What every test under the folder shows, in the order of files and tests."""
    return [
        Shown(report, path.relative_to(folder).as_posix(), test)
        for path in sorted(folder.rglob("test_*.py"))
        for test, report in _shown_in(path)
    ]


def _shown_in(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = IDS_IN_NAME.match(node.name)
            ids = named[1].upper().strip("_").split("_") if named else []
            for report in dict.fromkeys(ids + _marked(node)):
                yield node.name, report


def _marked(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Ids in its markers. Each is a string, or several are a tuple of strings."""
    found: list[str] = []
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(f".{MARKER}"):
            for argument in decorator.args:
                value = ast.literal_eval(argument)
                found += [value] if isinstance(value, str) else value
    return found


def document(reports: Mapping[str, Report], shown: list[Shown]) -> str:
    """The page: a table for each area."""
    parts = [HEAD]
    for letter, area in AREAS.items():
        parts.append(f"\n## {area}\n\n| id | kind | here | tests |\n|---|---|---|---|\n")
        for name, report in reports.items():
            if name.startswith(letter):
                here = report.outcome or f"cannot arise: {report.cannot_arise}"
                tests = _tests(name, shown)
                parts.append(f"| {name} | {report.kind} | {here} | {tests} |\n")
    return "".join(parts)


def _tests(report: str, shown: list[Shown]) -> str:
    by_file: dict[str, list[str]] = {}
    for one in shown:
        if one.report == report:
            by_file.setdefault(one.file, []).append(f"`{one.test}`")
    return "; ".join(f"{file}: {', '.join(tests)}" for file, tests in by_file.items())


if __name__ == "__main__":
    DOCUMENT.write_text(document(read_reports(), shown_by_tests()))
