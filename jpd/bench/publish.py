"""docs/benchmarks.md, and the figures in the README and the guide, from what benchmarks wrote.

Each benchmark has a file of results in docs/benchmarks/. A page's figures stand between two markers
and are written by nobody else; a test compares both. Called by `jpd bench all --docs`, and as a
program after a benchmark that ran by itself.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpd.bench.compare import verdicts
from jpd.bench.results import Result, shown
from jpd.errors import ConfigError, Problem

FOLDER = "docs/benchmarks"
PAGE, README, GUIDE = "docs/benchmarks.md", "README.md", "docs/when_to_disaggregate.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
MODES = ("disaggregated", "colocated, chunked", "colocated, whole prompts")


@dataclass(frozen=True, slots=True)
class Document:
    """One file of results."""

    name: str
    facts: Mapping[str, Any]  # machine, date, command, ...
    results: Sequence[Result]

    def value(self, name: str) -> str:
        """Of one result, as it is shown; a dash where there is none."""
        found = [result.value for result in self.results if result.name == name]
        return shown(found[0]) if found else "–"

    def find(self, pattern: str) -> list[tuple[re.Match[str], Result]]:
        """Results whose whole name matches."""
        matches = ((re.fullmatch(pattern, result.name), result) for result in self.results)
        return [(match, result) for match, result in matches if match is not None]


Documents = Mapping[str, Document]


def read_documents(folder: Path) -> dict[str, Document]:
    """By the names of their files. Raises ConfigError for a file that no benchmark wrote."""
    documents = {}
    for path in sorted(folder.glob("*.json")):
        try:
            facts = json.loads(path.read_text())
            listed = [
                Result(one["name"], one["value"], one["unit"], one["target"])
                for one in facts.pop("results")
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            rule = f"holds no results of a benchmark: {error!r}"
            raise ConfigError([Problem(str(path), "results", path.name, rule)]) from error
        documents[path.stem] = Document(path.stem, facts, listed)
    return documents


def pages(root: Path) -> dict[Path, str]:
    """Every page with figures, as it should be. Raises ConfigError where markers are missing."""
    documents = read_documents(root / FOLDER)
    return {
        root / PAGE: render_page(documents),
        root / README: with_figures(root / README, readme_figures(documents)),
        root / GUIDE: with_figures(root / GUIDE, guide_figures(documents)),
    }


def publish(root: Path) -> list[Path]:
    """Write them all."""
    found = pages(root)
    for path, text in found.items():
        path.write_text(text)
    return list(found)


def with_figures(path: Path, figures: str) -> str:
    """The page with what is between its markers replaced."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        rule = f"must have the lines {BEGIN} and {END}"
        raise ConfigError([Problem(str(path), "figures", "missing", rule)])
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


HEAD = """# Benchmarks

Written by `jpd bench all --quick --docs` from the files in `docs/benchmarks/`; nothing here is
typed by hand. A machine that does other work at the same time makes every time longer: compare
figures of one run.

```
pip install 'jpd[demo,bench]'             # the model, the load generator, pictures
jpd bench all --quick --docs              # in a checkout; each benchmark in its own process
jpd bench soak --minutes 60 --json docs/benchmarks/soak.json
python3 -m tests.support.command_costs    # in a fresh clone: each command and example, its memory

pip install torch --index-url https://download.pytorch.org/whl/cpu
pip install 'jpd[peers]'                  # builds llama.cpp: needs CMake and a C++ compiler
jpd bench peers --quick --json docs/benchmarks/peers.json
python -m jpd.bench.publish               # the pages again, from the files that are there
```

There is a section for each file that is there. `all --quick` ends what has not ended in ten
minutes, and leaves `peers` and `soak` out. Peers take turns, each in a process of its own;
transformers computes in float32 and in bfloat16, llama.cpp in the 4 bits of the file. A point that
was not measured in its limit says so, and so does a program that ended by itself: where a processor
lists AMX but the machine does not grant it, llama.cpp does, unless it is built without
(`CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON" pip install ...`). On
accelerators `serve` takes `--mesh mesh_configs/colocated-gpu.toml` or a file of several GPUs; its
ceilings name the device they were measured on.
"""


def render_page(documents: Documents) -> str:
    parts = [HEAD]
    for document in documents.values():
        rows = [(r.name, shown(r.value), r.unit, _target(r)) for r in document.results]
        parts.append(f"## {document.name}\n\n{origin([document])}\n")
        if (picture := _picture(document)) is not None:
            parts.append(f"{picture}\n")
        parts.append(table(("what", "value", "unit", "target"), rows, "lrll") + "\n")
    return "\n".join(parts)


def _picture(document: Document) -> str | None:
    plot = re.search(r"--plot (\S+)", str(document.facts["command"]))
    return None if plot is None else f"![{document.name}](benchmarks/{Path(plot[1]).name}.png)"


def _target(result: Result) -> str:
    return "" if result.target is None else f"{result.target:g}"


def readme_figures(documents: Documents) -> str:
    """Steps and the machine's ceilings, other programs, streams beside prompts, the verdict."""
    parts = [origin(documents.values()), engine_table(documents), peer_table(documents)]
    parts += [gap_table(documents), *verdict_lines(documents), goodput_line(documents)]
    return "\n\n".join(part for part in parts if part)


def guide_figures(documents: Documents) -> str:
    """What disaggregation changes, shape by shape, and what moving KV takes."""
    used = [documents[name] for name in ("compare", "interference") if name in documents]
    parts = [origin(used), compare_table(documents), compared_goodput_table(documents)]
    parts += verdict_lines(documents)
    return "\n\n".join(part for part in (*parts, gap_table(documents)) if part)


def origin(documents: Iterable[Document]) -> str:
    """Where figures come from: a line each for commands, machine and versions."""
    facts = [document.facts for document in documents]
    if not facts:
        return "No benchmark has been run yet."
    commands = " · ".join(f"`{one['command']}` ({one['seconds']:.0f} s)" for one in facts)
    versions = [f"{name} {version}" for one in facts for name, version in one["versions"].items()]
    pythons = [f"Python {one['python']}" for one in facts]
    told = ([one["machine"] for one in facts], [one["date"] for one in facts], pythons + versions)
    return "; ".join((commands, *(", ".join(dict.fromkeys(each)) for each in told))) + "."


def engine_table(documents: Documents) -> str:
    document = documents.get("engine")
    if document is None:
        return ""
    rows = []
    for match, result in document.find(r"(decode step, batch \d+, .*each|prefill of \d+ tokens)"):
        name = match[1]
        values = (document.value(f"{name}: {what}") for what in ("ratio", "MFU", "MBU"))
        rows.append((name, shown(result.value), *values))
    headers = ("engine", "ms", "x its matrix products alone", "MFU, %", "MBU, %")
    return table(headers, rows, "lrrrr")


def peer_table(documents: Documents) -> str:
    document = documents.get("peers")
    if document is None:
        return ""
    found = [match for match, _ in document.find(r"((?:prefill|decode),.*each): ([^:]*)(?::.*)?")]
    points, names = (list(dict.fromkeys(match[n] for match in found)) for n in (1, 2))
    rows = [
        (point, *(_tokens_per_second(document, f"{point}: {name}") for name in names))
        for point in points
    ]
    return table(("tokens/s", *names), rows, "l" + "r" * len(names))


def _tokens_per_second(document: Document, name: str) -> str:
    """Or why there is no such number."""
    for late in (f"{name}: not ended in", f"{name}: not begun in"):
        if document.find(re.escape(late)):
            return f"not in {document.value(late)} s"
    is_dead = document.find(re.escape(f"{name}: ended by itself, status"))
    return "ended by itself" if is_dead else document.value(name)


def gap_table(documents: Documents) -> str:
    document = documents.get("interference")
    if document is None:
        return ""
    columns = (
        *("ITL p50, alone", "ITL p50, under load", "ITL p99, alone", "ITL p99, under load"),
        "ITL p99 under load / alone",
    )
    rows = [(mode, *(document.value(f"{mode}: {what}") for what in columns)) for mode in MODES]
    heads = ("streams while long prompts arrive, ms", *columns[:4], "p99 ratio")
    return table(heads, rows, "lrrrrr")


def compare_table(documents: Documents) -> str:
    document = documents.get("compare")
    if document is None:
        return ""
    pattern = r"(.*): disaggregated / coupled, (.*)"
    found = [match for match, _ in document.find(pattern)]
    shapes, measures = (list(dict.fromkeys(match[n] for match in found)) for n in (1, 2))
    names = [f"disaggregated / coupled, {measure}" for measure in measures]
    names += ["after the first token KV still took", "of a request's time, that was"]
    heads = ("load", *(f"{measure}, x" for measure in measures), "KV, ms", "KV, % of time")
    rows = [(shape, *(document.value(f"{shape}: {name}") for name in names)) for shape in shapes]
    return table(heads, rows, "l" + "r" * len(names))


def compared_goodput_table(documents: Documents) -> str:
    """Of each shape and mode; a quick run knows who met the targets at its one rate only."""
    document = documents.get("compare")
    found = [] if document is None else document.find(rf"(.*): ({'|'.join(MODES)}): (.*goodput.*)")
    if not found:
        return ""
    cells = {
        (match[1], match[2]): f"{shown(result.value)} {result.unit}" for match, result in found
    }
    shapes = list(dict.fromkeys(shape for shape, _ in cells))
    rows = [(shape, *(cells.get((shape, mode), "–") for mode in MODES)) for shape in shapes]
    is_searched = any(result.unit != "%" for _, result in found)
    head = "goodput" if is_searched else "both targets met at the one rate of a quick run"
    return table((head, *MODES), rows, "lrrr")


def verdict_lines(documents: Documents) -> list[str]:
    document = documents.get("compare")
    if document is None:
        return []
    told = verdicts(document.results)
    return [f"Against the better of the two coupled ones, {line}." for line in told]


def goodput_line(documents: Documents) -> str:
    document = documents.get("serve")
    found = [] if document is None else document.find(r"goodput: (rate at which.*)")
    return "".join(f"Goodput, {match[1]}: {shown(r.value)} {r.unit}." for match, r in found)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], sides: str) -> str:
    """A Markdown table; `sides` has l or r for each column."""
    line = "|".join("---:" if side == "r" else "---" for side in sides)
    body = (f"| {' | '.join(cell for cell in row)} |" for row in rows)
    return "\n".join((f"| {' | '.join(heads)} |", f"|{line}|", *body))


if __name__ == "__main__":
    print("\n".join(f"written: {path}" for path in publish(Path())))
