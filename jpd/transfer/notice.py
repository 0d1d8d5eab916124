"""What a destination in another process is told of an offered piece, and how its bytes are cut.

Pure arithmetic on shapes: sizes of one piece may exceed what a message, or 32 bits, can hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jpd.transfer.protocol import KVPiece, PieceRange
from jpd.transfer.wire import Wire

PART_BYTES = 1 << 20
"""Of one message: large enough to be quick, small enough that a stream can be stopped."""


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Shape and dtype of one array of a piece."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        size = jnp.dtype(self.dtype).itemsize
        for dim in self.shape:
            size *= dim
        return size

    def empty(self) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
        return np.empty(self.shape, jnp.dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class Notice(PieceRange):
    """A piece without its arrays, and where they are to be had."""

    offer_id: str
    source_address: str
    transport: str  # how the source gives its arrays away
    transport_address: str  # where; empty: over the same service
    destination: str
    num_bytes: int
    is_last: bool
    wire: Wire
    arrays: tuple[ArrayForm, ...]


def notice_of(
    piece: KVPiece, offer_id: str, address: str, transport: str, transport_address: str
) -> Notice:
    return Notice(
        offer_id=offer_id,
        source_address=address,
        transport=transport,
        transport_address=transport_address,
        destination=piece.destination,
        attempt_id=piece.attempt_id,
        layer_start=piece.layer_start,
        num_layers=piece.num_layers,
        page_start=piece.page_start,
        num_pages=piece.num_pages,
        num_bytes=piece.num_bytes,
        is_last=piece.is_last,
        wire=piece.wire,
        arrays=tuple(form_of(array) for array in piece.arrays),
    )


def form_of(array: jax.Array) -> ArrayForm:
    return ArrayForm(tuple(array.shape), str(array.dtype))


def parts(num_bytes: int, part_bytes: int = PART_BYTES) -> Iterator[tuple[int, int]]:
    """Start and end of every part of an array's bytes, in order."""
    for start in range(0, num_bytes, part_bytes):
        yield start, min(start + part_bytes, num_bytes)
