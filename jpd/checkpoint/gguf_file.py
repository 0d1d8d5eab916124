"""The container format of a .gguf file: metadata and directory, checked against the file.

Knows bytes only: no model, no tokenizer, no quantisation beyond the size of a block. Called by
`gguf_source`; it exists because reading 262,144 tokens with the `gguf` package's reader takes
seconds.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jpd.errors import ConfigError, Problem

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 8
MAX_NESTING = 4  # arrays of arrays

FLOAT32, STRING, ARRAY = 6, 8, 9
SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. Shape in numpy order, the fastest dim last."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open .gguf file; `buffer` is its memory map."""

    path: Path
    metadata: Mapping[str, Any]  # str, int, float, bool, list of str, or a numpy array
    tensors: Mapping[str, GgufTensor]
    buffer: mmap.mmap


class _Cursor:
    """A position in the file; every read says what it was for when the file ends too early."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path, self.buffer, self.position = path, buffer, 0

    def fail(self, key: str, value: object, rule: str) -> ConfigError:
        return ConfigError([Problem(str(self.path), key, value, rule)])

    def take(self, num_bytes: int, what: str) -> int:
        """Move past `num_bytes`; returns where they start."""
        start = self.position
        if num_bytes < 0 or start + num_bytes > len(self.buffer):
            rule = f"truncated: {what} ends at byte {start + num_bytes}"
            raise self.fail("file size", len(self.buffer), rule)
        self.position = start + num_bytes
        return start

    def number(self, code: str, what: str) -> int:
        start = self.take(struct.calcsize(code), what)
        value: int = struct.unpack_from(code, self.buffer, start)[0]
        return value

    def text(self, what: str) -> str:
        num_bytes = self.number("<Q", what)
        start = self.take(num_bytes, what)
        try:
            return self.buffer[start : start + num_bytes].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(what, str(error), "must be UTF-8") from error

    def scalars(self, type_id: int, count: int, what: str) -> np.ndarray[Any, Any]:
        dtype = np.dtype(SCALARS[type_id])
        start = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self.buffer, dtype, count, start)

    def value(self, type_id: int, what: str, depth: int = 0) -> Any:
        if type_id == STRING:
            return self.text(what)
        if type_id in SCALARS:
            number = self.scalars(type_id, 1, what)[0]
            # A float32 means its shortest decimal form: 1e-06, not 9.99999997e-07.
            return float(str(number)) if type_id == FLOAT32 else number.item()
        if type_id != ARRAY or depth >= MAX_NESTING:
            raise self.fail(what, type_id, "is not a value type of the format")
        item_type, count = self.number("<I", what), self.number("<Q", what)
        if item_type == STRING:
            return self._texts(count, what)
        if item_type in SCALARS:
            return self.scalars(item_type, count, what)
        return [self.value(item_type, what, depth + 1) for _ in range(count)]

    def _texts(self, count: int, what: str) -> list[str]:
        return [self.text(what) for _ in range(count)]


def open_gguf(path: Path) -> GgufFile:
    """Read metadata and directory. Raises ConfigError for all but a whole GGUF file."""
    file_bytes = path.stat().st_size
    if file_bytes < 24:
        rule = "too short to be a GGUF file (at least 24 bytes)"
        raise ConfigError([Problem(str(path), "file size", file_bytes, rule)])
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, buffer)
    num_tensors, num_keys = _read_preamble(cursor)
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.text(f"name of metadata entry {index}")
        if key in metadata:
            raise cursor.fail(key, "twice", "a metadata key must stand once")
        metadata[key] = cursor.value(cursor.number("<I", key), key)
    tensors = _read_directory(cursor, num_tensors, _alignment(cursor, metadata))
    return GgufFile(path, metadata, tensors, buffer)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.take(4, "magic")
    magic = cursor.buffer[start : start + 4]
    if magic != MAGIC:
        raise cursor.fail("magic", magic, f"a GGUF file begins with {MAGIC!r}")
    version = cursor.number("<I", "version")
    if version not in VERSIONS:
        rule = f"must be one of {VERSIONS}, little-endian"
        raise cursor.fail("version", version, rule)
    return cursor.number("<Q", "tensor count"), cursor.number("<Q", "metadata count")


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail("general.alignment", alignment, "must be a power of two")
    return alignment


def _read_directory(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    rows: list[tuple[str, tuple[int, ...], int, int]] = []
    for index in range(num_tensors):
        name = cursor.text(f"name of tensor {index}")
        num_dims = cursor.number("<I", name)
        if num_dims > MAX_DIMS:
            raise cursor.fail(name, num_dims, f"a tensor has at most {MAX_DIMS} dims")
        dims = tuple(int(dim) for dim in cursor.scalars(10, num_dims, name))
        rows.append((name, dims[::-1], cursor.number("<I", name), cursor.number("<Q", name)))
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    problems: list[Problem] = []
    for name, shape, type_id, offset in rows:
        fault, num_bytes = _size_of(shape, type_id)
        missing = base + offset + num_bytes - len(cursor.buffer)
        if not fault and name in tensors:
            fault = "a tensor must stand once"
        if not fault and missing > 0:
            end = base + offset + num_bytes
            fault = f"truncated: needs {num_bytes} bytes up to byte {end}; the file ends before it"
            problems.append(Problem(str(cursor.path), name, len(cursor.buffer), fault))
            continue
        if fault:
            problems.append(Problem(str(cursor.path), name, [list(shape), type_id], fault))
            continue
        tensors[name] = GgufTensor(name, shape, type_id, base + offset, num_bytes)
    if problems:
        raise ConfigError(problems)
    return tensors


def _size_of(shape: tuple[int, ...], type_id: int) -> tuple[str, int]:
    """(fault or "", bytes) of a tensor."""
    sizes = block_sizes()
    if type_id not in sizes:
        return "its quantisation is not known to the installed gguf package", 0
    block_numbers, block_bytes = sizes[type_id]
    if shape and shape[-1] % block_numbers:
        return f"its rows must be a multiple of {block_numbers} numbers", 0
    return "", math.prod(shape) // block_numbers * block_bytes


def block_sizes() -> Mapping[int, tuple[int, int]]:
    """Numbers and bytes of a block, by type id. Raises ConfigError without the gguf extra."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        rule = "is needed to read .gguf files: install jpd with the extra `gguf`"
        raise ConfigError([Problem("environment", "package", "gguf", rule)]) from error
    return {int(kind): (int(a), int(b)) for kind, (a, b) in GGML_QUANT_SIZES.items()}
