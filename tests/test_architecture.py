"""Rules of the house that no linter knows: import order, cycles, sizes, words, public names."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import jpd

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jpd"

LAYERS = {
    0: (
        *(
            "chat_template",
            "config",
            "mesh_file",
            "mesh_hosts",
            "mesh_router",
            "errors",
            "grammar",
            "log_lines",
            "metrics",
            "request",
        ),
        *("tokenizer", "toml_reader"),
    ),
    1: ("parallel",),
    2: ("kernels",),
    3: ("cache",),
    4: ("nn", "checkpoint", "guidance", "rpc"),
    5: ("engine", "transfer"),
    7: ("worker", "launch"),
    8: ("router",),
    9: ("frontend", "bench", "planner", "explore"),
    10: ("api", "cli", "__init__", "__main__"),
}

NO_JAX = (
    "jpd.config",
    "jpd.mesh_file",
    "jpd.mesh_hosts",
    "jpd.mesh_router",
    "jpd.errors",
    "jpd.request",
    "jpd.metrics",
    "jpd.chat_template",
    "jpd.grammar",
    "jpd.guidance",
    "jpd.tokenizer",
    "jpd.toml_reader",
    "jpd.cache.page_allocator",
    "jpd.cache.page_hashes",
    "jpd.cache.prefix_cache",
    "jpd.cache.prefix_log",
    "jpd.engine.buckets",
    "jpd.engine.scheduler",
    "jpd.nn.config",
    "jpd.worker.protocol",
    "jpd.router",
)

FORBIDDEN_NAMES = re.compile(r"block_tables?|seq_ids?|\w*(Manager|Helper)|utils")
FORBIDDEN_FILES = re.compile(r"\w*_(new|v2|old)|\w*(helpers?|utils?|common|misc)")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

DATES = {
    "jpd.bench.results",
    "jpd.chat_template",
    "jpd.frontend.answers",
    "jpd.frontend.openai_http",
    "jpd.frontend.spans",
    "jpd.parallel.platform",
}
"""What tells the date of an answer, a report, a span or a prompt, or compares the ages of files."""
GENERATED = re.compile(r"_pb2(_grpc)?$")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files() -> dict[str, Path]:
    files = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: path for name, path in files.items() if not GENERATED.search(name)}


FILES = source_files()
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in FILES.items()}


def layer_of(module: str) -> int:
    parts = module.split(".")
    top = parts[1] if len(parts) > 1 else "__init__"
    if top.startswith("cli_"):
        top = "cli"
    for layer, names in LAYERS.items():
        if top in names:
            return layer
    raise AssertionError(f"{module} stands in no layer: name it in LAYERS or put it elsewhere")


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Modules named by import statements anywhere: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)


IMPORTS: Mapping[str, frozenset[str]] = {
    name: frozenset(imports_of(tree)) - {name} for name, tree in TREES.items()
}


def reachable(module: str) -> set[str]:
    """Everything that importing the module brings in, its parent packages included."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            parts = name.split(".")
            waiting += [".".join(parts[:n]) for n in range(2, len(parts))]
            waiting += IMPORTS.get(name, ())
    return seen


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module: str) -> None:
    for imported in IMPORTS[module]:
        if imported.split(".")[0] == "jpd":
            assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}"


def test_no_import_cycles() -> None:
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in finished:
            return
        for imported in sorted(IMPORTS.get(module, ())):
            visit(imported, (*path, module))
        finished.add(module)

    for module in FILES:
        visit(module, ())


def test_no_jax_in_host_logic() -> None:
    checked = [m for m in FILES if any(m == n or m.startswith(f"{n}.") for n in NO_JAX)]
    assert len(checked) >= len(NO_JAX) - 1
    for module in checked:
        bad = [name for name in reachable(module) if name.split(".")[0] in ("jax", "flax")]
        assert not bad, f"{module} reaches {bad}"


def test_router_runs_where_jax_is_not_installed() -> None:
    modules = [m for m in FILES if m.startswith("jpd.router.")]
    assert modules
    blocked = "import sys; sys.modules.update(jax=None, jaxlib=None, flax=None); "
    code = blocked + "; ".join(f"import {module}" for module in modules)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_imports_inside_functions_but_optional_packages() -> None:
    optional = {"opentelemetry", "gguf", "sentencepiece", "httpx", "ray", "matplotlib"}
    for module, tree in TREES.items():
        functions = (
            n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        inner = {name for function in functions for name in imports_of(function)}
        allowed = {name for name in inner if name.split(".")[0] in optional}
        if module == "jpd":
            allowed |= {name for name in inner if name.startswith("jpd.")}
        assert inner <= allowed, f"{module} imports {inner - allowed} inside a function"


@pytest.mark.parametrize("module", FILES)
def test_size_and_docstring(module: str) -> None:
    lines = FILES[module].read_text().count("\n")
    assert lines <= MAX_FILE_LINES, f"{module} has {lines} lines"
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{module}.{node.name} has {length} lines"
    if lines:
        assert ast.get_docstring(TREES[module]), f"{module} has no docstring"


def test_package_inits_hold_no_code() -> None:
    for module, path in FILES.items():
        if path.name == "__init__.py" and module != "jpd" and module != "jpd.nn.families":
            body = [n for n in TREES[module].body if not isinstance(n, ast.Expr)]
            assert not body, f"{module}/__init__.py holds code"


def test_every_folder_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    missing = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]
    assert not missing


def test_words_that_are_not_ours() -> None:
    for module, path in FILES.items():
        assert not FORBIDDEN_FILES.fullmatch(path.stem), path
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            bad = token.type == tokenize.NAME and FORBIDDEN_NAMES.fullmatch(token.string)
            assert not bad, f"{module}:{token.start[0]}: {token.string}"


def test_only_the_command_line_prints() -> None:
    for module, tree in TREES.items():
        if layer_of(module) == 10 or module.startswith("jpd.bench."):
            continue
        calls = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call))
        names = {f.id for f in calls if isinstance(f, ast.Name)}
        assert "print" not in names, f"{module} prints: use logging"


def test_only_dates_and_ages_of_files_are_of_the_clock_that_can_jump() -> None:
    """Deadlines, leases and timers that followed it would end, or never, when it is set."""
    jumping = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow|today)\(|\blocaltime\(")
    found = {name for name, path in FILES.items() if jumping.search(path.read_text())}
    assert found == DATES


def test_no_dead_text() -> None:
    for module, path in FILES.items():
        found = re.search(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text())
        assert not found, f"{module}: {found.group() if found else ''}"


def test_public_names_are_documented_and_resolve() -> None:
    doors = (ROOT / "docs" / "doors.md").read_text()
    for name in jpd.__all__:
        assert getattr(jpd, name) is not None
        assert f"jpd.{name}" in doors, f"jpd.{name} is public but not in docs/doors.md"
    assert sorted(jpd.__all__) == list(jpd.__all__)


def files_told(tree: str) -> dict[str, set[str]]:
    """The names of files that a drawn tree of jpd/ has in each of its folders."""
    told: dict[str, set[str]] = {"": set()}
    at = {2: ""}  # by indentation: whose files stand there
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        at = {depth: folder for depth, folder in at.items() if depth <= indent}
        around = at[max(at)]
        folder = re.match(r"([a-z]\w*)/(\s|$)", line.lstrip())
        if folder:
            at[indent + 2] = around = f"{around}{folder[1]}/"
        names = re.findall(r"(?<![*/\w])\w+\.(?:py|proto)\b", line)
        told.setdefault(around, set()).update(names)
    return told


def test_the_tree_of_the_code_has_every_file_in_its_folder() -> None:
    text = (ROOT / "docs" / "code.md").read_text()
    told = files_told(text.partition("```\njpd/\n")[2].partition("\nmodels/")[0])
    found: dict[str, set[str]] = {}
    for path in (*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.proto")):
        if path.name != "__init__.py" and "_pb2" not in path.name:
            folder = path.relative_to(PACKAGE).parent.as_posix() + "/"
            found.setdefault("" if folder == "./" else folder, set()).add(path.name)
    for folder in found:
        assert told.get(folder) == found[folder], folder
    assert {folder for folder in told if told[folder]} == set(found)


def test_the_readme_draws_every_folder_with_its_layer() -> None:
    text = (ROOT / "README.md").read_text()
    tree = text.partition("```\njpd/\n")[2].partition("\nmodels/")[0]
    told = re.findall(r"^  (\w+)/ +(\d+) ", tree, re.MULTILINE)
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    layers = [
        (name, str(layer)) for layer, names in LAYERS.items() for name in names if name in folders
    ]
    assert sorted(told) == sorted(layers)
