"""Model cards: models/*.toml, one model each, so that deployments can be planned without weights.

[config] holds the keys of the model's config.json, [weights] says where the weights come from and
in which format they are held (`weights = "int8"` alone says only that).
Knows no family. Called by `model_source`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jpd.errors import ConfigError, Problem
from jpd.nn.config import WeightFormat
from jpd.toml_reader import Table, read_toml

MAX_PARAMS = 1 << 50


NULL = "null"
"""What stands in [config] for a null of config.json: TOML has none, and a missing key is another
thing."""


@dataclass(frozen=True, slots=True)
class CardWeights:
    """Where the weights are: at most one of the first two; `huggingface` is for people to read."""

    package: str | None = None  # a Python package whose `assemble` writes a .gguf file
    path: Path | None = None  # a Hugging Face folder, an Orbax folder or a .gguf file
    sha256: str | None = None
    huggingface: str | None = None
    format: WeightFormat = "float"  # how matrices are held when they are served


@dataclass(frozen=True, slots=True)
class ModelCard:
    path: Path
    name: str
    source: str  # where the figures come from
    num_params: int  # as published, or counted from the published figures; `source` says which
    config: Mapping[str, Any]
    weights: CardWeights


def read_card(path: Path) -> ModelCard:
    """Raises ConfigError with every fault of the file."""
    problems: list[Problem] = []
    root = Table(str(path), "", read_toml(path), problems)
    for key, what in (
        ("source", "where the figures come from"),
        ("num_params", "how many parameters the model has"),
        ("config", "a table with the keys of the model's config.json"),
    ):
        root.required(key, what)
    name = root.text("name", path.stem)
    source = root.text("source", "", r"(?s).+")
    num_params = root.integer("num_params", 0, low=1, high=MAX_PARAMS)
    config = root.value("config")
    if config is not None and not isinstance(config, Mapping):
        root.problem("config", config, "must be a table")
    weights = _read_weights(root, path.parent)
    root.close()
    if problems:
        raise ConfigError(problems)
    table = dict(config) if isinstance(config, Mapping) else {}
    table = {key: None if value == NULL else value for key, value in table.items()}
    return ModelCard(path, name, source, num_params, table, weights)


def _read_weights(root: Table, folder: Path) -> CardWeights:
    """A table; or only a format, of a card that does not say where the weights are."""
    if isinstance(root.value("weights"), str):
        return CardWeights(format=_format(root.choice("weights", "float", WeightFormat)))
    table = root.table("weights")
    package = table.text("package", None, r"[A-Za-z_][A-Za-z0-9_]*")
    path = table.text("path", None)
    sha256 = table.text("sha256", None, r"[0-9a-f]{64}")
    huggingface = table.text("huggingface", None, r"[\w.-]+/[\w.-]+")
    if package is not None and path is not None:
        table.problem("path", path, f"stands beside package = {package!r}: give one of them")
    held = _format(table.choice("format", "float", WeightFormat))
    table.close()
    where = None if path is None else folder / path
    return CardWeights(package, where, sha256, huggingface, held)


def _format(name: str) -> WeightFormat:
    return "int8" if name == "int8" else "float"


def find_card(name: str) -> Path | None:
    """The card called `name` in models/ here, else among those that come with jpd."""
    if Path(name).name != name:
        return None
    file_name = name if name.endswith(".toml") else f"{name}.toml"
    for folder in card_folders():
        if (folder / file_name).is_file():
            return folder / file_name
    return None


def card_folders() -> tuple[Path, ...]:
    package = Path(__file__).parent.parent
    return Path.cwd() / "models", package / "models", package.parent / "models"
