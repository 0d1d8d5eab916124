"""`open_model`: one name for a model, wherever it comes from.

1. A card (.toml, or its bare name), a Hugging Face or Orbax folder, or a .gguf file is found.
2. Its family translates the configuration; tokenizer and generation defaults are read.
3. The weights are opened, not read.
Called by the command line, the launcher and the planner.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from jpd.chat_template import ChatTemplates
from jpd.checkpoint.card import ModelCard, card_folders, find_card, read_card
from jpd.checkpoint.dequantised_source import dequantised
from jpd.checkpoint.gguf_config import config_from_gguf
from jpd.checkpoint.gguf_file import open_gguf
from jpd.checkpoint.gguf_source import gguf_source
from jpd.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from jpd.checkpoint.orbax_source import OrbaxSource, is_orbax_folder, open_orbax, stored_format
from jpd.checkpoint.package_weights import (
    assembled_weights,
    cache_folder,
    file_sha256,
    is_installed,
)
from jpd.checkpoint.safetensors_source import open_safetensors
from jpd.checkpoint.sentencepiece_tokenizer import SentencePieceTokenizer, load_sentencepiece_file
from jpd.checkpoint.source import TensorSource
from jpd.errors import ConfigError, Problem, RequestError
from jpd.nn.config import DecoderConfig, WeightFormat
from jpd.nn.families import config_from_hf
from jpd.nn.families.quantization import quantization_of
from jpd.request import SamplingParams
from jpd.tokenizer import (
    HuggingFaceTokenizer,
    Tokenizer,
    load_huggingface_tokenizer,
    read_tokenizer_config,
    special_token_texts,
)

logger = logging.getLogger(__name__)

GENERATION_NAME = "generation_config.json"
EMBEDDINGS = "model.embed_tokens.weight"

WeightSource = TensorSource | OrbaxSource
"""What `load_params` takes."""

GenerationConfig = Literal["auto", "off"]
"""Whether the sampling settings of generation_config.json are the defaults of requests."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling settings that the model's authors recommend; None: they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, float | int]:
        """Those they do say, as fields of SamplingParams."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Model:
    """A model as it was found. `source` None: its weights are not on this machine."""

    name: str
    spec: str
    config: DecoderConfig
    source: WeightSource | None
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]  # of config, generation_config and tokenizer together
    generation: GenerationDefaults = GenerationDefaults()
    num_params: int | None = None  # as the card says
    raw_config: Mapping[str, Any] = field(default_factory=dict)  # the keys of config.json
    hint: str = ""  # where its weights can be had

    def require_source(self) -> WeightSource:
        """The weights. Raises ConfigError when they are not here."""
        if self.source is None:
            rule = f"its weights are not on this machine{self.hint}"
            raise ConfigError([Problem(self.spec, "model", self.name, rule)])
        return self.source


def open_model(
    spec: str,
    *,
    chat_template: str | None = None,
    weights: WeightFormat | None = None,
    generation_config: GenerationConfig = "auto",
    need_weights: bool = True,
) -> Model:
    """Open the model that `spec` names. Raises ConfigError with everything that is wrong with it.

    `chat_template` is a file that replaces the model's own template; `weights` how matrices are to
    be held, None: as the card or the checkpoint has it; `generation_config` off: without the
    sampling settings that its authors recommend. Without `need_weights` only the configuration is
    read: `source` and `tokenizer` are None.
    """
    path = Path(os.path.expanduser(spec))
    if path.suffix == ".toml" and path.is_file():
        model = _from_card(read_card(path), spec, need_weights)
    elif path.is_dir():
        model = _from_folder(path, spec, need_weights)
    elif path.is_file():
        model = _from_gguf(path, spec, need_weights)
    else:
        card = find_card(spec)
        if card is None:
            raise ConfigError([_not_found(spec)])
        model = _from_card(read_card(card), spec, need_weights)
    if weights is not None:
        model = with_weights(model, weights)
    if generation_config == "off":
        model = replace(model, generation=GenerationDefaults())
    if chat_template is not None:
        model = replace(model, tokenizer=_with_template(model, Path(chat_template)))
    return model


def are_weights_here(spec: str) -> bool:
    """Whether `spec` is a folder or file with weights in it, not a card or only a configuration."""
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        return is_orbax_folder(path) or any(path.glob("*.safetensors"))
    return path.is_file() and path.suffix != ".toml"


def _not_found(spec: str) -> Problem:
    known = sorted({card.stem for folder in card_folders() for card in folder.glob("*.toml")})
    rule = (
        "is not a card (.toml), a folder with config.json or a .gguf file, "
        f"nor the name of a card: {', '.join(known)}"
    )
    return Problem("--model", "model", spec, rule)


def _from_card(card: ModelCard, spec: str, need_weights: bool) -> Model:
    config = config_from_hf(card.config, str(card.path))
    config = replace(config, weights=card.weights.format)
    model = _model(card.name, spec, config, card.config)
    model = replace(model, num_params=card.num_params, hint=_hint(card))
    weights = _card_weights(card) if need_weights else None
    if weights is None:
        return model
    found = _from_folder(weights, spec) if weights.is_dir() else _from_gguf(weights, spec)
    _check_same(card, weights, config, found.config)
    if found.config.weights == "int8":  # whatever the card says: there is nothing else to serve
        model = replace(model, config=found.config)
    eos_ids = _union(model.eos_token_ids, found.eos_token_ids)
    return replace(
        model,
        source=found.source,
        tokenizer=found.tokenizer,
        eos_token_ids=eos_ids,
        generation=found.generation,
    )


def _hint(card: ModelCard) -> str:
    weights = card.weights
    if weights.package is not None:
        return f": install the package {weights.package.replace('_', '-')}"
    if weights.path is not None:
        return f": {weights.path} is not there"
    if weights.huggingface is not None:
        return f": download {weights.huggingface} and pass its folder as the model"
    return ""


def _card_weights(card: ModelCard) -> Path | None:
    weights = card.weights
    if weights.package is not None and is_installed(weights.package):
        return assembled_weights(weights.package, weights.sha256, cache_folder())
    if weights.path is None or not weights.path.exists():
        return None
    if weights.sha256 is not None and weights.path.is_file():
        found = file_sha256(weights.path)
        if found != weights.sha256:
            rule = f"{weights.path} has sha256 {found}"
            raise ConfigError([Problem(str(card.path), "weights.sha256", weights.sha256, rule)])
    return weights.path


FREE_IN_CARDS = ("eos_token_ids", "bos_token_id", "weights")


def _check_same(card: ModelCard, weights: Path, told: DecoderConfig, found: DecoderConfig) -> None:
    """The card must describe the weights it points to."""
    problems = []
    for item in fields(DecoderConfig):
        ours, theirs = getattr(told, item.name), getattr(found, item.name)
        if item.name not in FREE_IN_CARDS and ours != theirs:
            rule = f"the weights in {weights} say {theirs!r}"
            problems.append(Problem(str(card.path), f"config ({item.name})", ours, rule))
    if problems:
        raise ConfigError(problems)


def _from_gguf(path: Path, spec: str, need_weights: bool = True) -> Model:
    file = open_gguf(path)
    raw = config_from_gguf(file)
    config = config_from_hf(raw, str(path))
    if not need_weights:
        return _model(path.stem, spec, config, raw)
    model = _model(path.stem, spec, config, raw, tokenizer_from_gguf(file))
    return replace(model, source=gguf_source(file))


def _from_folder(folder: Path, spec: str, need_weights: bool = True) -> Model:
    if not (folder / "config.json").is_file():
        rule = "holds no config.json, which every Hugging Face or Orbax folder has"
        raise ConfigError([Problem("--model", "model", spec, rule)])
    raw = _read_json(folder / "config.json")
    config = config_from_hf(raw, str(folder / "config.json"))
    if is_orbax_folder(folder):
        config = replace(config, weights=stored_format(folder))
    name = folder.resolve().name
    if not need_weights:
        return _model(name, spec, config, raw)
    generation = _read_json(folder / GENERATION_NAME)
    model = _model(name, spec, config, raw, _folder_tokenizer(folder), generation, str(folder))
    return replace(model, source=_folder_source(folder, raw))


def _folder_source(folder: Path, raw: Mapping[str, Any]) -> WeightSource:
    if is_orbax_folder(folder):
        return open_orbax(folder)
    source = open_safetensors(folder)
    stored = quantization_of(raw, str(folder / "config.json"))
    return source if stored is None else dequantised(source, stored)


def _folder_tokenizer(folder: Path) -> Tokenizer | None:
    if (folder / "tokenizer.json").exists():
        return load_huggingface_tokenizer(folder)
    config = read_tokenizer_config(folder)
    if (folder / "tokenizer.model").exists():
        templates = ChatTemplates.from_folder(folder, config, special_token_texts(config))
        return load_sentencepiece_file(folder / "tokenizer.model", config, templates)
    if config:
        message = "%s: neither tokenizer.json nor tokenizer.model: token ids only"
        logger.warning(message, folder)
    return None


def _read_json(path: Path) -> dict[str, Any]:
    """The table in `path`; an empty one where there is no such file."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([Problem(str(path), path.name, str(error), "must be JSON")]) from error
    if not isinstance(values, dict):
        problem = Problem(str(path), path.name, type(values).__name__, "must be a JSON table")
        raise ConfigError([problem])
    return values


def _model(
    name: str,
    spec: str,
    config: DecoderConfig,
    raw: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    generation: Mapping[str, Any] | None = None,
    file: str = "",
) -> Model:
    generation = generation or {}
    if tokenizer is not None:
        _check_vocabulary(tokenizer, config, file or spec)
    eos_ids = _union(
        config.eos_token_ids,
        _ids(generation.get("eos_token_id")),
        tokenizer.eos_token_ids if tokenizer is not None else (),
    )
    known = tuple(token_id for token_id in eos_ids if 0 <= token_id < config.vocab_size)
    defaults = _generation_defaults(generation, f"{file}/{GENERATION_NAME}")
    return Model(name, spec, config, None, tokenizer, known, defaults, raw_config=raw)


def _union(*lists: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token_id for ids in lists for token_id in ids))


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool)]


def _generation_defaults(values: Mapping[str, Any], file: str) -> GenerationDefaults:
    """Raises ConfigError: each request that leaves a field out would be refused for it."""
    names = [item.name for item in fields(GenerationDefaults)]
    given = {name: values[name] for name in names if values.get(name) is not None}
    if given.get("top_k") == -1:  # another way to say off
        given["top_k"] = 0
    problems = []
    for name, value in given.items():
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            problems.append(Problem(file, name, value, error.rule))
    if problems:
        raise ConfigError(problems)
    return GenerationDefaults(**given)


def _check_vocabulary(tokenizer: Tokenizer, config: DecoderConfig, file: str) -> None:
    """Ordinary tokens must have an embedding; special ones (of images) may lack one."""
    if tokenizer.vocab_size <= config.vocab_size:
        return
    special: frozenset[int] = getattr(tokenizer, "special_token_ids", frozenset())
    beyond = [i for i in range(config.vocab_size, tokenizer.vocab_size) if i not in special]
    if any(tokenizer.token_bytes(token_id) for token_id in beyond):
        rule = f"exceeds the vocabulary of {EMBEDDINGS}: vocab_size = {config.vocab_size}"
        raise ConfigError([Problem(file, "tokenizer", tokenizer.vocab_size, rule)])
    message = "%s: special tokens from id %d on have no embedding; prompts with them are refused"
    logger.warning(message, file, config.vocab_size)


def with_weights(model: Model, weights: WeightFormat) -> Model:
    """The model with its matrices held so. Raises ConfigError when they are int8 in the file."""
    source = model.source
    if isinstance(source, OrbaxSource) and not source.is_float and weights == "float":
        rule = f"{source.location} was written as {source.weights}: its numbers are rounded already"
        raise ConfigError([Problem(model.spec, "weights", weights, rule)])
    return replace(model, config=replace(model.config, weights=weights))


def _with_template(model: Model, path: Path) -> Tokenizer:
    tokenizer = model.tokenizer
    if isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer):
        return tokenizer.with_templates(tokenizer.templates.with_override(path))
    rule = "needs a model with a tokenizer"
    raise ConfigError([Problem("--chat-template", "chat_template", str(path), rule)])
