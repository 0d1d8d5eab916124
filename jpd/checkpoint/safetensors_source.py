"""A Hugging Face folder of safetensors files as a TensorSource.

The index is a map from tensor to file, not a list of files: what it does not name is never read.
Headers are checked against the file sizes when the source is opened. Knows no model. Called by
`model_source`.
"""

import json
import logging
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from jpd.checkpoint.source import HostArray, Slices, TensorInfo
from jpd.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

NOT_READ_BY_THE_LIBRARY = frozenset(DTYPES[name] for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0"))
"""NumPy itself has no such types."""


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    info: TensorInfo
    first_byte: int  # of its numbers in the file


class SafetensorsSource:
    """Tensors of one folder. Files stay open (memory-mapped) for the life of the source."""

    def __init__(self, folder: Path, entries: Mapping[str, _Entry]) -> None:
        self._folder = folder
        self._entries = dict(entries)
        paths = {entry.path for entry in self._entries.values()}
        self._files = {path: safe_open(path, framework="numpy") for path in paths}

    @property
    def location(self) -> str:
        return str(self._folder)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def info(self, name: str) -> TensorInfo:
        return self._entries[name].info

    def file_of(self, name: str) -> str:
        return str(self._entries[name].path)

    def read(self, name: str) -> HostArray:
        if self.info(name).dtype in NOT_READ_BY_THE_LIBRARY:
            return self._mapped(name).copy()
        array: HostArray = self._file(name).get_tensor(name)
        return array

    def read_slice(self, name: str, slices: Slices) -> HostArray:
        if not slices:
            return self.read(name)
        if self.info(name).dtype in NOT_READ_BY_THE_LIBRARY:
            return self._mapped(name)[slices].copy()
        part: HostArray = self._file(name).get_slice(name)[slices]
        return part

    def _mapped(self, name: str) -> HostArray:
        entry = self._entries[name]
        shape, dtype = entry.info
        as_bytes = np.memmap(entry.path, np.uint8, "r", entry.first_byte, shape)
        return np.asarray(as_bytes).view(dtype)

    def _file(self, name: str) -> Any:  # the library's stubs leave its methods untyped
        return self._files[self._entries[name].path]


def open_safetensors(folder: Path) -> SafetensorsSource:
    """Open the checkpoint in `folder`. Raises ConfigError with all faults of index and headers."""
    if (folder / INDEX_NAME).exists():
        entries = _indexed_entries(folder)
    else:
        entries = _read_header(_only_file(folder))
    return SafetensorsSource(folder, entries)


def _only_file(folder: Path) -> Path:
    if (folder / SINGLE_NAME).exists():
        _warn_of_strays(folder, {SINGLE_NAME})
        return folder / SINGLE_NAME
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    shown = [path.name for path in found[:4]]
    rule = f"needs {SINGLE_NAME}, or {INDEX_NAME} saying which file holds which tensor"
    raise ConfigError([Problem(str(folder), "safetensors files", shown, rule)])


def _warn_of_strays(folder: Path, used: set[str]) -> None:
    strays = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in used)
    if strays:
        logger.warning("%s: not part of the checkpoint, ignored: %s", folder, ", ".join(strays))


def _indexed_entries(folder: Path) -> dict[str, _Entry]:
    index_path = folder / INDEX_NAME
    weight_map = _read_weight_map(index_path)
    problems: list[Problem] = []
    headers: dict[str, dict[str, _Entry]] = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        num_named = sum(1 for value in weight_map.values() if value == file_name)
        if not path.is_file():
            rule = f"the index puts {num_named} tensors in this file, which is not in the folder"
            problems.append(Problem(str(index_path), "weight_map", file_name, rule))
            continue
        try:
            headers[file_name] = _read_header(path)
        except ConfigError as error:
            problems.extend(error.problems)
    entries = {}
    for name, file_name in weight_map.items():
        if file_name not in headers:
            continue
        if name not in headers[file_name]:
            rule = f"the index puts tensor {name} in this file, which does not hold it"
            problems.append(Problem(str(folder / file_name), name, "missing", rule))
            continue
        entries[name] = headers[file_name][name]
    if problems:
        raise ConfigError(problems)
    _warn_of_strays(folder, set(headers))
    _warn_of_copies(folder, weight_map, headers)
    return entries


def _read_weight_map(index_path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        valid = all(isinstance(value, str) for value in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        rule = "must be JSON with a weight_map from tensor name to file name"
        raise ConfigError([Problem(str(index_path), "weight_map", str(error), rule)]) from error
    outside = [name for name in weight_map.values() if not valid or Path(name).name != name]
    if not valid or not weight_map or outside:
        rule = "must name at least one tensor, each with a file name of this folder"
        raise ConfigError([Problem(str(index_path), "weight_map", outside[:1], rule)])
    return dict(weight_map)


def _warn_of_copies(
    folder: Path, weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, _Entry]]
) -> None:
    for file_name, header in headers.items():
        extra = sorted(name for name in header if weight_map.get(name) != file_name)
        if extra:
            path = folder / file_name
            message = "%s: %d tensors the index does not look for here are ignored, e.g. %s"
            logger.warning(message, path, len(extra), extra[0])


def _read_header(path: Path) -> dict[str, _Entry]:
    """Names, shapes and types in one file, after checking that they fill the file exactly."""
    header, data_bytes = _parse_header(path)
    data_start = path.stat().st_size - data_bytes
    problems: list[Problem] = []
    entries: dict[str, _Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        fault, info, span = _read_entry(fields)
        if fault or info is None:
            problems.append(Problem(str(path), name, fields, fault))
            continue
        entries[name] = _Entry(path, info, data_start + span[0])
        spans.append((*span, name))
    if not problems:  # or an entry that was refused would be told again as a gap
        problems = [*_overlaps(path, spans), *_cut_off(path, spans, data_bytes)]
    if problems:
        raise ConfigError(problems)
    used_bytes = max((end for _, end, _ in spans), default=0)
    if used_bytes != data_bytes:
        rule = f"the header describes {used_bytes} bytes of tensors; the file holds {data_bytes}"
        raise ConfigError([Problem(str(path), "file size", path.stat().st_size, rule)])
    return entries


def _parse_header(path: Path) -> tuple[dict[str, Any], int]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            rule = "too short to be a safetensors file (at least 8 bytes)"
            raise ConfigError([Problem(str(path), "file size", file_bytes, rule)])
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(file_bytes - 8, MAX_HEADER_BYTES):
            rule = f"the header claims more bytes than follow in the file ({file_bytes - 8})"
            raise ConfigError([Problem(str(path), "header size", header_bytes, rule)])
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        problem = Problem(str(path), "header", str(error), "must be JSON")
        raise ConfigError([problem]) from error
    if not isinstance(header, dict):
        raise ConfigError([Problem(str(path), "header", type(header).__name__, "must be a table")])
    return header, file_bytes - 8 - header_bytes


def _read_entry(fields: Any) -> tuple[str, TensorInfo | None, tuple[int, int]]:
    """(fault or "", info, (first byte, end byte)) of one header entry."""
    nothing = (0, 0)
    try:
        dtype_name, shape = fields["dtype"], tuple(int(dim) for dim in fields["shape"])
        start, end = (int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError):
        return "must have dtype, shape and two data_offsets", None, nothing
    if dtype_name not in DTYPES:
        return f"dtype must be one of {', '.join(DTYPES)}", None, nothing
    if min(shape, default=0) < 0 or not 0 <= start <= end:
        return "dims and offsets must not be negative", None, nothing
    needed = math.prod(shape) * DTYPES[dtype_name].itemsize
    if needed != end - start:
        return f"shape and dtype need {needed} bytes, the offsets span {end - start}", None, nothing
    return "", TensorInfo(shape, DTYPES[dtype_name]), (start, end)


def _overlaps(path: Path, spans: list[tuple[int, int, str]]) -> list[Problem]:
    problems = []
    position = 0
    for start, end, name in sorted(spans):
        if start != position and start != end:
            rule = f"tensors must follow one another; the one before ends at {position}"
            problems.append(Problem(str(path), name, start, rule))
        position = max(position, end)
    return problems


def _cut_off(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> list[Problem]:
    """One problem for a truncated file, however many of its tensors are gone."""
    beyond = sorted(span for span in spans if span[1] > data_bytes)
    if not beyond:
        return []
    _, end, name = beyond[0]
    rule = f"ends at data byte {end}, but the file holds {data_bytes} data bytes: truncated"
    if len(beyond) > 1:
        rule += f" ({len(beyond)} of its {len(spans)} tensors are cut off)"
    return [Problem(str(path), name, "cut off", rule)]
