"""TensorSource: named tensors of a checkpoint, read lazily and in parts.

Names are those of Hugging Face checkpoints, whatever the file format. Knows no model and no device.
The readers implement it; `jpd.checkpoint.load` and `convert` read through it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

HostArray: TypeAlias = npt.NDArray[Any]
Slices: TypeAlias = tuple[slice, ...]

NUMBERS_PER_CHECK = 1 << 20
"""Numbers looked at together when weights are checked: small beside any real tensor."""


class TensorInfo(NamedTuple):
    """What is known of a tensor without reading it. `dtype`: of the arrays `read` returns."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class TensorSource(Protocol):
    """The tensors of one checkpoint. Reading is safe from several threads."""

    @property
    def location(self) -> str:
        """The file or folder, for messages."""
        ...

    @property
    def names(self) -> frozenset[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def file_of(self, name: str) -> str:
        """The file that holds the tensor, for messages."""
        ...

    def read(self, name: str) -> HostArray: ...

    def read_slice(self, name: str, slices: Slices) -> HostArray:
        """Part of a tensor: one slice with step 1 per dim. Reads little more than that part."""
        ...


def full_slices(shape: Sequence[int]) -> Slices:
    return tuple(slice(0, dim) for dim in shape)


def row_blocks(shape: Sequence[int], max_numbers: int = NUMBERS_PER_CHECK) -> Iterator[Slices]:
    """Cut a tensor into runs along its first dim of about `max_numbers` numbers each."""
    if not shape:
        yield ()
        return
    per_row = max(1, int(np.prod(shape[1:])))
    step = max(1, max_numbers // per_row)
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), *full_slices(shape[1:]))


def num_not_finite(values: HostArray) -> int:
    """How many of the numbers are NaN or infinite; integers never are."""
    if values.dtype.kind in "iub":
        return 0
    return int(values.size - np.count_nonzero(np.isfinite(values)))
