"""The guides: mesh files through the reader; keys, metrics, routes and commands that exist."""

import ast
import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from jpd import config
from jpd.cli import build_parser
from jpd.cli_bench import BENCHMARKS
from jpd.frontend import border, http_protocol, job
from jpd.frontend.admin import AdminRoutes
from jpd.frontend.http_app import DEFAULT_MAX_BODY_BYTES
from jpd.frontend.openai_http import OpenAiRoutes
from jpd.frontend.operations import OperationRoutes
from jpd.frontend.page_routes import PageRoutes
from jpd.frontend.prompts import MAX_PROMPTS
from jpd.mesh_file import DEFAULT_SLOTS, load_deployment
from jpd.metrics import Metrics
from jpd.nn.families import FAMILIES
from jpd.request import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, RequestState
from jpd.router import trace
from jpd.router.policies import POLICIES

TABLES = {
    "[[host]]": config.HostConfig,
    "[[worker]]": config.WorkerConfig,
    "[engine]": config.EngineConfig,
    "[cache]": config.CacheConfig,
    "[router]": config.RouterConfig,
    "[router.failure]": config.FailureConfig,
    "[[slo]]": config.SloConfig,
    "[launch]": config.LaunchConfig,
    "[security]": config.SecurityConfig,
}
REQUIRED = dataclasses.MISSING


def read_rows(text: str) -> list[list[str]]:
    """The cells of the tables' rows whose first cell is code."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[row[0].strip("`"), *row[1:]] for row in rows]


def default_in(cell: str) -> Any:
    """What a cell says of a default: a TOML value, none, or that there must be one."""
    if cell in ("none", "required"):
        return None if cell == "none" else REQUIRED
    return tomllib.loads(f"value = {cell.strip('`')}")["value"]


def defaults_of(kind: type) -> dict[str, Any]:
    """Of the keys of a table of the mesh file."""
    found = {field.name: field.default for field in dataclasses.fields(kind)}
    if kind is config.WorkerConfig:  # the reader makes several fields of a table
        axes = [found.pop(axis) for axis in ("data", "tensor", "expert")]
        assert axes == [REQUIRED] * 3
        found |= {"mesh": {}, "slots": DEFAULT_SLOTS}
    if kind is config.RouterConfig:
        found.pop("failure")  # a table of its own
    return {name: list(value) if value == () else value for name, value in found.items()}


def test_every_key_of_a_mesh_file_is_told_with_its_default(repo: Path) -> None:
    text = (repo / "docs" / "mesh_file.md").read_text()
    parts = re.split(r"^## (\S+?)(?=[:\s]).*$", text, flags=re.MULTILINE)[1:]
    told = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(told) == list(TABLES)
    for name, kind in TABLES.items():
        rows = {row[0]: default_in(row[1]) for row in read_rows(told[name])}
        assert rows == defaults_of(kind), name


@pytest.mark.parametrize("name", ["README.md", "docs/mesh_file.md"])
def test_mesh_files_of_the_guides_can_be_read(repo: Path, tmp_path: Path, name: str) -> None:
    examples = re.findall(r"```toml\n(.*?)```", (repo / name).read_text(), re.DOTALL)
    assert examples
    for example in examples:
        path = tmp_path / "mesh.toml"
        path.write_text(example)
        assert load_deployment(path).workers


def test_every_metric_is_told(repo: Path) -> None:
    rows = read_rows((repo / "docs" / "doors.md").read_text())
    told = [row[:3] for row in rows if row[0].startswith("jpd:")]
    metrics = [metric for name, metric in vars(Metrics()).items() if name != "registry"]
    for row, metric in zip(told, metrics, strict=True):
        name = metric._name + ("_total" if metric._type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)
        assert row == [name, metric._type, labels]


def test_every_route_is_told(repo: Path) -> None:
    text = (repo / "docs" / "doors.md").read_text()
    told = set(re.findall(r"`((?:GET|POST|DELETE) /[^\s`]*)`", text))
    found = set()
    nothing: Any = None
    for routes in (
        OpenAiRoutes(nothing),
        OperationRoutes(nothing, nothing),
        PageRoutes(nothing, nothing),
        AdminRoutes(nothing, None),
    ):
        for route in routes.router.routes:
            path = route.path.replace(":path", "")
            found |= {f"{method} {path}" for method in route.methods}
    assert told == found | {"GET /docs", "GET /redoc", "GET /openapi.json"}


def test_limits_are_told_as_they_are(repo: Path) -> None:
    text = " ".join((repo / "docs" / "doors.md").read_text().split())
    for told in (
        f"at most {border.DEFAULT_MAX_CALLS:,} calls are under way (`--max-calls`)",
        f"and {config.RouterConfig().max_waiting:,} requests wait for room",
        f"A body has at most {DEFAULT_MAX_BODY_BYTES >> 20} MiB, a call {MAX_PROMPTS} prompts and",
        f"{job.MAX_CHOICES_PER_PROMPT} choices of each, {job.MAX_STOPS} stop strings of",
        f"{job.MAX_STOP_CHARS:,} characters, {MAX_STOP_TOKEN_IDS} stop ids and {MAX_LOGIT_BIASES}",
        f"biases, an id {job.MAX_ID_CHARS} characters",
        f"must be whole {http_protocol.REQUEST_SECONDS:g} s after its connection",
        f"must be taken on within {http_protocol.TAKING_SECONDS:g} s",
        f"`/timeline` for the last {trace.MAX_REQUESTS:,} that ended",
    ):
        assert told in text, told


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "docs"])
def test_links_lead_somewhere(repo: Path, name: str) -> None:
    pages = sorted((repo / name).rglob("*.md")) if (repo / name).is_dir() else [repo / name]
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in link:
                continue
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.is_file(), f"{page.name}: {link}"
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor else []
            anchors = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings}
            assert not anchor or anchor in anchors, f"{page.name}: {link}"


def test_every_policy_and_family_is_told(repo: Path) -> None:
    rows = read_rows((repo / "docs" / "routing.md").read_text())
    assert [row[0] for row in rows] == list(POLICIES)
    told = set(re.findall(r"\w+For\w+", (repo / "docs" / "models.md").read_text()))
    assert told == {name for family in FAMILIES.values() for name in family.architectures}


def test_readme_names_commands_benchmarks_and_guides(repo: Path) -> None:
    text = (repo / "README.md").read_text()
    commands = next(action.choices for action in build_parser()._actions if action.choices)
    rows = {row[0]: row[1] for row in read_rows(text)}
    assert {name for name in rows if name.startswith("jpd ")} == {f"jpd {c}" for c in commands}
    for name in BENCHMARKS:
        assert f"`{name}`" in rows["jpd bench"]
    guides = {f"docs/{path.name}" for path in (repo / "docs").glob("*.md")}
    assert {name for name in rows if name.startswith("docs/")} == guides


def test_the_life_of_a_request_names_what_is_there(repo: Path) -> None:
    text = (repo / "README.md").read_text()
    life = text.partition("## The life of a request")[2].partition("\n## ")[0]
    told = re.findall(r"`([^`]+)`", life)
    names = {name for name in told if re.fullmatch(r"[A-Za-z_]+(\.[a-z_]+)?", name)}
    here = names_in(repo / "jpd") | {field.name for field in dataclasses.fields(config.CacheConfig)}
    assert names - here == {"jax.device_put"}
    states = [word for name in told if " " in name for word in name.split()]
    assert set(states) == {state.name for state in RequestState}


def names_in(folder: Path) -> set[str]:
    """Functions and classes of all modules, and the methods of each class."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.ClassDef):
                methods = (item for item in node.body if hasattr(item, "name"))
                found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_mesh_files_and_commands_of_the_guide_are_real(repo: Path, tmp_path: Path) -> None:
    text = (repo / "docs" / "multi_host.md").read_text()
    first, *_ = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "mesh.toml"
    path.write_text(first)
    assert load_deployment(path).launch.kind == "subprocess"
    asked = [line.split()[1:] for line in re.findall(r"`(jpd workers [^`]+ [A-Z|a-z ]+)`", text)]
    assert [words[1] for words in asked] == ["drain", "set-role", "add", "remove"]
    for words in asked:
        options = build_parser().parse_args([word.partition("|")[0] for word in words])
        assert options.action == words[1]


def test_every_dependency_has_its_reason(repo: Path) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[<>=]", line)[0] for lines in lists for line in lines}
    wanted = {name for name in names if not name.startswith("jpd[")}
    table = (repo / "docs" / "code.md").read_text().partition("## Built on")[2]
    told = {
        name
        for row in re.findall(r"^\| ([^|]+) \| ", table, re.MULTILINE)
        for name in re.sub(r" \(extra `\w+`\)", "", row).split(", ")
    }
    assert told - {"package"} == wanted
