"""`jpd convert SRC DST`: any model → an Orbax folder, one parameter in memory at a time.

1. Everything that can be wrong with the source is found first.
2. Parameters are read, brought into jpd's layout and written one after another.
3. Configuration and tokenizer follow, then the folder gets its name: killed, it leaves no DST.
Called by the command line.
"""

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jpd.checkpoint.int8 import quantize
from jpd.checkpoint.layout import check_values, param_refs
from jpd.checkpoint.model_source import Model, open_model
from jpd.checkpoint.orbax_source import (
    LAYOUT_VERSION,
    MARKER_NAME,
    PARAMS_NAME,
    OrbaxSource,
    file_sizes,
)
from jpd.checkpoint.progress import ProgressCallback, ProgressMeter
from jpd.checkpoint.sentencepiece_tokenizer import SentencePieceTokenizer
from jpd.checkpoint.source import HostArray, TensorSource
from jpd.errors import ConfigError, Problem
from jpd.nn.config import WeightFormat
from jpd.nn.families.quantization import QUANTIZATION
from jpd.nn.params import abstract_params
from jpd.nn.tensor_ref import TensorRef
from jpd.tokenizer import HuggingFaceTokenizer

CHUNK_BYTES = 64 << 20
"""A device that needs part of a parameter reads whole chunks of at most this size."""

COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote."""

    folder: Path
    num_params: int
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _StreamedParam:
    """A parameter that is read when it is written. Orbax sees an array by its shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], HostArray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class _StreamingHandler(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    """Orbax's handler of numpy arrays, given one array at a time."""

    def __init__(self, meter: ProgressMeter) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._meter = meter

    async def serialize(
        self, values: Sequence[_StreamedParam], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        for value, info, arg in zip(values, infos, args, strict=True):
            for written in await super().serialize([value.read()], [info], [arg]):
                written.result()  # on disk before the next one is read
            self._meter.add(value.nbytes, value.name)
        return []


def convert(
    source: str,
    destination: str | Path,
    *,
    dtype: str | None = None,
    weights: WeightFormat | None = None,
    progress: ProgressCallback | None = None,
) -> Converted:
    """Write `source` as an Orbax folder. `dtype` None: as stored (float32 for quantised sources).
    `weights`: how matrices are written; None: as the card says.

    Raises ConfigError for a bad source or a destination that exists; nothing is left behind then.
    """
    target = Path(os.path.expanduser(destination)).absolute()
    if os.path.lexists(target):
        rule = "exists already: choose another name or remove it"
        raise ConfigError([Problem(str(target), "destination", target.name, rule)])
    model = open_model(source, weights=weights)
    tensors = model.require_source()
    if isinstance(tensors, OrbaxSource):
        raise ConfigError(
            [Problem(source, "source", tensors.location, "is an Orbax folder already")]
        )
    params = _streamed_params(model, tensors, dtype, progress)
    partial = target.parent / f".{target.name}.partial-{uuid.uuid4().hex}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        partial.mkdir()
        _write_params(partial / PARAMS_NAME, params, progress)
        _write_description(partial, model, params)
        os.replace(partial, target)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise ConfigError([Problem(str(target), "destination", target.name, rule)]) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    num_bytes = sum(param.nbytes for param in params)
    return Converted(target, _num_params(params), num_bytes, _kind(model, params))


def _streamed_params(
    model: Model, source: TensorSource, dtype: str | None, progress: ProgressCallback | None
) -> list[_StreamedParam]:
    abstract = abstract_params(model.config, dtype or "float32")
    refs = param_refs(source, model.config, abstract)
    check_values(source, refs, progress)
    params = []
    weights = {spec.scale_path: spec for spec in abstract.specs if spec.summed}
    for spec in abstract.specs:
        made_of = weights.get(spec.path, spec)
        ref = refs[made_of.path]
        if made_of.summed:
            stored = np.dtype(spec.dtype)
            read = _int8_reader(source, ref, made_of.summed, 1 if spec.is_scale else 0)
        else:
            stored = np.dtype(spec.dtype) if dtype else source.info(ref.names[0]).dtype
            read = _reader(source, ref, stored)
        params.append(_StreamedParam(spec.path, spec.shape, stored, read))
    return params


def _int8_reader(
    source: TensorSource, ref: TensorRef, summed: tuple[int, ...], which: int
) -> Callable[[], HostArray]:
    """Reads a weight and gives its int8 numbers (0) or its scales (1)."""

    def read() -> HostArray:
        return quantize(ref.read(source.read_slice), summed)[which]

    return read


def _reader(source: TensorSource, ref: TensorRef, dtype: np.dtype[Any]) -> Callable[[], HostArray]:
    def read() -> HostArray:
        return np.ascontiguousarray(ref.read(source.read_slice).astype(dtype, copy=False))

    return read


def _write_params(
    folder: Path, params: Sequence[_StreamedParam], progress: ProgressCallback | None
) -> None:
    meter = ProgressMeter("writing", sum(param.nbytes for param in params), progress)
    registry = ocp.type_handlers.create_type_handler_registry(
        (_StreamedParam, _StreamingHandler(meter))
    )
    item = {param.name: param for param in params}
    save_args = {param.name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for param in params}
    args = ocp.args.PyTreeSave(item=item, save_args=save_args)
    with _without_warnings("absl"):
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_ocdbt=False)
        with ocp.Checkpointer(handler) as checkpointer, _os_errors():
            checkpointer.save(folder, args=args)


@contextmanager
def _os_errors() -> Iterator[None]:
    """A full disk is an OSError here too: TensorStore has it as a ValueError with its number."""
    try:
        yield
    except ValueError as error:
        found = re.search(r"os_error_code='(\d+)'", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


@contextmanager
def _without_warnings(logger_name: str) -> Iterator[None]:
    """Orbax warns of things that are meant here: no jax arrays, and one file per parameter. What it
    raises it also logs."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _write_description(folder: Path, model: Model, params: Sequence[_StreamedParam]) -> None:
    config = {name: value for name, value in model.raw_config.items() if name != QUANTIZATION}
    _write_json(folder / "config.json", config)
    origin = Path(os.path.expanduser(model.spec))
    if origin.is_dir():
        for name in COPIED_FILES:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, folder / name)
    else:
        _write_tokenizer(folder, model)
    marker = {
        "layout": LAYOUT_VERSION,
        "source": model.name,
        "weights": model.config.weights,
        "num_params": _num_params(params),
        "file_bytes": file_sizes(folder / PARAMS_NAME),
    }
    _write_json(folder / MARKER_NAME, marker)


def _num_params(params: Sequence[_StreamedParam]) -> int:
    """As published: scales do not count."""
    return sum(int(np.prod(param.shape)) for param in params if not param.name.endswith(".scale"))


def _kind(model: Model, params: Sequence[_StreamedParam]) -> str:
    if model.config.weights == "int8":
        return "int8 with a scale per channel"
    return str(params[0].dtype)


def _write_tokenizer(folder: Path, model: Model) -> None:
    """Of a model that had no folder of its own: a .gguf file, or a card's."""
    tokenizer = model.tokenizer
    config: dict[str, Any] = {}
    if isinstance(tokenizer, SentencePieceTokenizer):
        (folder / "tokenizer.model").write_bytes(tokenizer.model_file())
        config["add_bos_token"] = tokenizer.vocabulary.add_bos
        config["add_eos_token"] = tokenizer.vocabulary.add_eos
        config.update(tokenizer.special_texts())
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save(folder / "tokenizer.json")
        config.update(tokenizer.config)
    if tokenizer is not None:
        if tokenizer.chat_template is not None:
            config["chat_template"] = tokenizer.chat_template
        _write_json(folder / "tokenizer_config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": list(model.eos_token_ids)})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _remove_leftovers(target: Path) -> None:
    """What an earlier conversion to the same place left when it was killed."""
    for folder in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(folder, ignore_errors=True)
