"""TensorRef: how one parameter is made of tensors in a checkpoint file.

Expressed so that a part of the parameter (what one device holds) is read from the part of the file
that covers it.
Made by `jpd.nn.families`, read by `jpd.checkpoint`. No jax.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

HostArray: TypeAlias = npt.NDArray[Any]
Slices: TypeAlias = tuple[slice, ...]
ReadSlice: TypeAlias = Callable[[str, Slices], HostArray]
Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A parameter as a view of a file tensor, or of several equal ones stacked on a new first axis.

    1. Each dim i of the file tensor is cut to the run from `starts[i]`, as long as the product of
       `splits[i]`, and reshaped to those dims. The dims of all splits are numbered in a row.
    2. `windows` cuts single split dims: (dim, start, stop).
    3. `order` says which split dim each dim of the parameter is; a dim left out must be one wide.
    """

    names: tuple[str, ...]
    file_shape: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    starts: tuple[int, ...] = ()  # (): zeros
    windows: tuple[tuple[int, int, int], ...] = ()
    is_stacked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        ranges = self._full_ranges()
        shape = tuple(ranges[dim][1] - ranges[dim][0] for dim in self.order)
        return (len(self.names), *shape) if self.is_stacked else shape

    def read(self, read_slice: ReadSlice, index: Slices | None = None) -> HostArray:
        """The parameter, or its part `index` (a slice with step 1 per dim), in the file's dtype."""
        shape = self.shape
        index = index if index is not None else tuple(slice(None) for _ in shape)
        bounds = [part.indices(dim)[:2] for part, dim in zip(index, shape, strict=True)]
        names = self.names
        if self.is_stacked:
            names, bounds = names[slice(*bounds[0])], bounds[1:]
        ranges = self._full_ranges()
        for dim, (low, high) in zip(self.order, bounds, strict=True):
            ranges[dim] = (ranges[dim][0] + low, ranges[dim][0] + high)
        parts = [self._read_one(name, read_slice, ranges) for name in names]
        return np.stack(parts) if self.is_stacked else parts[0]

    def _full_ranges(self) -> list[Range]:
        ranges = [(0, dim) for split in self.splits for dim in split]
        for dim, low, high in self.windows:
            ranges[dim] = (low, high)
        return ranges

    def _read_one(self, name: str, read_slice: ReadSlice, ranges: list[Range]) -> HostArray:
        file_slices, shape, inner = [], [], []
        taken = 0
        for i, split in enumerate(self.splits):
            cover = _cover(split, ranges[taken : taken + len(split)])
            start = self.starts[i] if self.starts else 0
            file_slices.append(slice(start + cover.start, start + cover.stop))
            shape += cover.shape
            inner += cover.inner
            taken += len(split)
        part = read_slice(name, tuple(file_slices)).reshape(shape)[tuple(inner)]
        dropped = tuple(dim for dim in range(len(ranges)) if dim not in self.order)
        kept = [dim for dim in range(len(ranges)) if dim in self.order]
        order = [kept.index(dim) for dim in self.order]
        return part.squeeze(dropped).transpose(order)


@dataclass(frozen=True, slots=True)
class _Cover:
    """The smallest run of a file dim that holds a box of its split dims; the box within it."""

    start: int
    stop: int
    shape: list[int]
    inner: list[slice]


def _cover(split: tuple[int, ...], ranges: list[Range]) -> _Cover:
    offset = 0
    for i, (low, high) in enumerate(ranges):
        rest = math.prod(split[i + 1 :])
        if high - low == 1 and i + 1 < len(split):
            offset += low * rest
            continue
        shape = [1] * i + [high - low, *split[i + 1 :]]
        inner = [slice(None)] * (i + 1) + [slice(*bounds) for bounds in ranges[i + 1 :]]
        return _Cover(offset + low * rest, offset + high * rest, shape, inner)
    raise AssertionError("a file dim is split into no dims")


def vector(name: str, dims: tuple[int, ...]) -> TensorRef:
    """A one-dimensional file tensor as [*dims]."""
    return TensorRef((name,), (math.prod(dims),), (dims,), tuple(range(len(dims))))


def matrix(name: str, shape: tuple[int, int]) -> TensorRef:
    """A file tensor as it is."""
    return TensorRef((name,), shape, ((shape[0],), (shape[1],)), (0, 1))


def linear(
    name: str, in_dim: int, out_dims: tuple[int, ...], *, first_row: int = 0, num_rows: int = 0
) -> TensorRef:
    """Rows of a file tensor [num_rows, in], from `first_row` on, as [in, *out_dims]."""
    rows = num_rows or math.prod(out_dims)
    order = (len(out_dims), *range(len(out_dims)))
    return TensorRef((name,), (rows, in_dim), (out_dims, (in_dim,)), order, (first_row, 0))


def linear_from(name: str, in_dims: tuple[int, ...], out_dim: int) -> TensorRef:
    """A file tensor [out, in] as [*in_dims, out]."""
    order = (*range(1, len(in_dims) + 1), 0)
    return TensorRef((name,), (out_dim, math.prod(in_dims)), ((out_dim,), in_dims), order)
