"""Quantised matrices of a Hugging Face folder as the floating-point tensors they stand for.

Wraps the folder's own TensorSource: scales and packed blocks vanish, and only the part that is
asked for is dequantised. All of it is checked when the source is made. Called by `model_source`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from jpd.checkpoint.source import HostArray, Slices, TensorInfo, TensorSource, full_slices
from jpd.errors import ConfigError, Problem
from jpd.nn.families.quantization import FP8, StoredQuantization

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

SCALE_SUFFIX = "_scale_inv"
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"

MXFP4_BYTES = 16
"""Bytes of a block of 32 numbers that share a scale."""
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NOT_A_NUMBER = 255
"""The scale that is no power of two."""


def _byte_values() -> HostArray:
    """float32 [256, 2]: the two numbers in each byte, that of its low half first."""
    sixteen = np.array([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)], np.float32)
    return np.stack([np.tile(sixteen, 16), np.repeat(sixteen, 16)], axis=1)


BYTE_VALUES = _byte_values()


@dataclass(frozen=True, slots=True)
class _Quantised:
    """`values` and `scales` are tensors of the folder, `info` says what they become."""

    values: str
    scales: str
    info: TensorInfo
    read: Callable[["_Quantised", Slices], HostArray]


class DequantisedSource:
    """The folder's tensors, those of `quantised` under the names of what they become."""

    def __init__(self, source: TensorSource, quantised: Mapping[str, _Quantised]) -> None:
        self._source, self._quantised = source, dict(quantised)
        used = {part for one in quantised.values() for part in (one.values, one.scales)}
        self._names = (source.names - used) | quantised.keys()

    @property
    def location(self) -> str:
        return self._source.location

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        one = self._quantised.get(name)
        return one.info if one else self._source.info(name)

    def file_of(self, name: str) -> str:
        one = self._quantised.get(name)
        return self._source.file_of(one.values if one else name)

    def read(self, name: str) -> HostArray:
        return self.read_slice(name, full_slices(self.info(name).shape))

    def read_slice(self, name: str, slices: Slices) -> HostArray:
        one = self._quantised.get(name)
        if one is None:
            return self._source.read_slice(name, slices)
        return one.read(one, slices or full_slices(one.info.shape))


def dequantised(source: TensorSource, stored: StoredQuantization) -> DequantisedSource:
    """Raises ConfigError with every tensor whose scales are missing or do not fit."""
    find = _float8_tensors if stored.method == FP8 else _mxfp4_tensors
    problems: list[Problem] = []
    found = find(source, stored, problems)
    if problems:
        raise ConfigError(problems)
    return DequantisedSource(source, found)


def _float8_tensors(
    source: TensorSource, stored: StoredQuantization, problems: list[Problem]
) -> dict[str, _Quantised]:
    """[out, in] of float8, one scale for each block of rows and columns; the last may be cut."""
    found: dict[str, _Quantised] = {}
    for name in sorted(source.names):
        shape, dtype = source.info(name)
        if name.endswith(SCALE_SUFFIX):
            values = name.removesuffix(SCALE_SUFFIX)
            if values not in source.names or source.info(values).dtype != FLOAT8:
                rule = f"the scales of {values}, which is not there or not float8"
                problems.append(Problem(source.file_of(name), name, list(shape), rule))
        if dtype != FLOAT8:
            continue
        if len(shape) != 2:
            rule = "a float8 tensor must have two dims"
            problems.append(Problem(source.file_of(name), name, list(shape), rule))
            continue
        scales = name + SCALE_SUFFIX
        expected = tuple(-(-dim // size) for dim, size in zip(shape, stored.block, strict=True))
        problems.extend(_scale_problems(source, name, scales, expected, "fV"))
        read = partial(_read_float8, source, stored.block)
        found[name] = _Quantised(name, scales, TensorInfo(shape, FLOAT32), read)
    return found


def _scale_problems(
    source: TensorSource, values: str, scales: str, expected: tuple[int, ...], kinds: str
) -> list[Problem]:
    if scales not in source.names:
        rule = f"{values} needs these scales, of shape {list(expected)}"
        return [Problem(source.file_of(values), scales, "missing", rule)]
    shape, dtype = source.info(scales)
    if shape != expected:
        of = f"{values} of shape {list(source.info(values).shape)}"
        rule = f"the scales of {of} must have shape {list(expected)}"
        return [Problem(source.file_of(scales), scales, list(shape), rule)]
    if dtype.kind not in kinds:
        rule = f"the scales of {values} are of another type"
        return [Problem(source.file_of(scales), scales, str(dtype), rule)]
    return []


def _read_float8(
    source: TensorSource, block: tuple[int, int], one: _Quantised, slices: Slices
) -> HostArray:
    values: HostArray = source.read_slice(one.values, slices).astype(np.float32)
    runs = [part.indices(dim)[:2] for part, dim in zip(slices, one.info.shape, strict=True)]
    pairs = list(zip(runs, block, strict=True))
    covering = tuple(slice(low // size, -(-high // size)) for (low, high), size in pairs)
    scales = source.read_slice(one.scales, covering).astype(np.float32)
    rows, columns = (np.arange(low, high) // size - low // size for (low, high), size in pairs)
    values *= scales[rows][:, columns]
    return values


def _mxfp4_tensors(
    source: TensorSource, _: StoredQuantization, problems: list[Problem]
) -> dict[str, _Quantised]:
    """Blocks uint8 [E, out, in / 32, 16] with scales uint8 [E, out, in / 32], as [E, in, out]."""
    found: dict[str, _Quantised] = {}
    for blocks in sorted(source.names):
        name = blocks.removesuffix(BLOCKS_SUFFIX)
        shape, dtype = source.info(blocks)
        if blocks.endswith(SCALES_SUFFIX):
            values = blocks.removesuffix(SCALES_SUFFIX) + BLOCKS_SUFFIX
            if values not in source.names:
                rule = f"these scales need {values}"
                problems.append(Problem(source.file_of(blocks), blocks, list(shape), rule))
        if name == blocks:
            continue
        if len(shape) != 4 or shape[-1] != MXFP4_BYTES or dtype != np.uint8:
            rule = f"must be uint8 [experts, out, in / 32, {MXFP4_BYTES}]"
            problems.append(Problem(source.file_of(blocks), blocks, f"{dtype} {list(shape)}", rule))
            continue
        scales = name + SCALES_SUFFIX
        problems.extend(_scale_problems(source, blocks, scales, shape[:-1], "u"))
        experts, out_dim, num_blocks, _bytes = shape
        info = TensorInfo((experts, num_blocks * 2 * MXFP4_BYTES, out_dim), BFLOAT16)
        found[name] = _Quantised(blocks, scales, info, partial(_read_mxfp4, source))
    return found


def _read_mxfp4(source: TensorSource, one: _Quantised, slices: Slices) -> HostArray:
    """Exact in bfloat16: a number has two significant bits."""
    pairs = zip(slices, one.info.shape, strict=True)
    experts, (low, high), out = (part.indices(dim)[:2] for part, dim in pairs)
    width = 2 * MXFP4_BYTES
    covering = (slice(*experts), slice(*out), slice(low // width, -(-high // width)))
    packed = source.read_slice(one.values, (*covering, slice(0, MXFP4_BYTES)))
    exponents = source.read_slice(one.scales, covering).astype(np.int32)
    values = BYTE_VALUES[packed].reshape(*packed.shape[:-1], width)
    with np.errstate(over="ignore"):  # infinite numbers are refused by whoever checks them
        factors = np.ldexp(np.float32(1), exponents - 127)
        factors[exponents == NOT_A_NUMBER] = np.nan
        values *= factors[..., None]
    rows = values.reshape(*packed.shape[:2], -1)[:, :, low % width :][:, :, : high - low]
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).astype(BFLOAT16)
