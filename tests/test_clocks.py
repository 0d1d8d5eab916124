"""A wall clock that jumps moves no deadline, lease or pause: whoever waits asks another clock."""

import ast
from collections.abc import Iterator
from pathlib import Path

WALL_CLOCK = {
    "frontend/openai_http.py": "when the model was made ready, told as `created`",
    "frontend/answers.py": "when an answer was begun, told as `created`",
    "frontend/spans.py": "of spans, whose collectors want it",
    "chat_template.py": "the day, for templates that name it",
    "bench/results.py": "the day of a measurement",
    "parallel/platform.py": "compared with the times of files",
}
"""Who may ask what time it is, and what for."""

NAMES = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}


def asked_of_the_wall_clock(source: str) -> Iterator[str]:
    """Calls and mentions such as `time.time`, and imports of such names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("time", "datetime", "date") and node.attr in NAMES:
                yield f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"time.{name.name}" for name in node.names if name.name in NAMES)


def test_the_wall_clock_is_asked_for_what_people_read_only(repo: Path) -> None:
    folder = repo / "jpd"
    askers = {
        str(path.relative_to(folder)): found
        for path in folder.rglob("*.py")
        if (found := sorted(asked_of_the_wall_clock(path.read_text())))
    }
    assert askers.keys() == WALL_CLOCK.keys(), askers


def test_it_is_found_however_it_is_asked() -> None:
    for source in ("import time\ntime.time()", "from time import time", "f = time.time_ns"):
        assert list(asked_of_the_wall_clock(source))
    assert not list(asked_of_the_wall_clock("import time\ntime.monotonic()\ntime.sleep(1)"))
