"""What travels between workers and the three verbs that move it.

A worker *offers* a piece, the transfer *pulls* it to the destination's mesh, and *releases* the
staging arrays on the way when the piece has arrived or its attempt is cancelled. A prefill worker
offers what it computed; a decode worker what it is *asked* for. Staging arrays are never part of a
KV pool, so neither side's pages are touched while a copy is in flight: the source's pages may be
freed after the gather was dispatched, the destination's are written by their own thread after
arrival.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
from jax.sharding import Mesh

from jpd.errors import TransferError
from jpd.transfer.wire import Wire


@dataclass(frozen=True, slots=True)
class PieceRange:
    """Which part of an attempt's KV a piece is: some layers of some pages.

    Pages are of the destination's size. `page_start` counts those of the sequence, not of a pool.
    """

    attempt_id: str
    layer_start: int
    num_layers: int
    page_start: int
    num_pages: int

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_start + self.num_layers)

    @property
    def pages(self) -> range:
        return range(self.page_start, self.page_start + self.num_pages)

    @property
    def where(self) -> str:
        """In words, for errors."""
        layers = f"layers {self.layer_start}+{self.num_layers}"
        return f"pages {self.page_start}+{self.num_pages}, {layers} of {self.attempt_id}"


@dataclass(frozen=True, slots=True)
class KVPiece(PieceRange):
    """A part of one attempt's KV, gathered into staging arrays on the source mesh, ready to travel.

    Arrays are padded to a bucket: rows from `num_pages` on are rubbish. A piece of no pages says
    that the source does not hold what it was asked for.
    """

    destination: str
    arrays: tuple[jax.Array, ...]  # as `wire` says, of n >= num_pages pages
    wire: Wire
    num_bytes: int  # of these layers of the num_pages pages; padding and copies not counted
    is_last: bool
    offered_time: float  # time.monotonic seconds


@dataclass(frozen=True, slots=True)
class ArrivedPiece(PieceRange):
    """A piece on its destination mesh, or why it did not get there (then `arrays` is empty)."""

    arrays: tuple[jax.Array, ...]  # of the uncut wire, on the destination's mesh
    num_bytes: int
    is_last: bool
    error: TransferError | None = None


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Pages of an attempt that `destination` lacks and `source` holds."""

    attempt_id: str
    source: str
    destination: str
    page_start: int  # of the destination's pages, counted in the sequence
    num_pages: int


def arrived_piece(
    piece: PieceRange,
    arrays: tuple[jax.Array, ...],
    num_bytes: int,
    is_last: bool,
    error: TransferError | None = None,
) -> ArrivedPiece:
    """What is delivered of a piece that was offered."""
    return ArrivedPiece(
        attempt_id=piece.attempt_id,
        layer_start=piece.layer_start,
        num_layers=piece.num_layers,
        page_start=piece.page_start,
        num_pages=piece.num_pages,
        arrays=arrays,
        num_bytes=num_bytes,
        is_last=is_last,
        error=error,
    )


Deliver = Callable[[ArrivedPiece], None]
"""Takes an arrived piece. Called on a transfer thread; must not block and must not raise."""

Serve = Callable[[PageRequest], None]
"""Offers what is asked for, soon. Called on any thread; must not block and must not raise."""


class KVTransfer(Protocol):
    """Moves pieces to registered workers. All methods may be called from any thread."""

    def register(
        self, worker: str, mesh: Mesh, deliver: Deliver, serve: Serve | None = None
    ) -> None:
        """Make `worker` a destination whose pieces go to `mesh` and then to `deliver`.

        What others ask of it goes to `serve`; None: it has nothing to give.
        """
        ...

    def offer(self, piece: KVPiece) -> None:
        """Send a piece. Never blocks; what goes wrong is delivered as the piece's error."""
        ...

    def ask(self, request: PageRequest) -> None:
        """Let the source offer these pages. Never blocks. OSError: nobody knows where it is.

        A request may be lost: the destination has a deadline of its own.
        """
        ...

    def cancel(self, attempt_id: str) -> None:
        """Drop what has not arrived of the attempt. Idempotent, never blocks."""
        ...

    def num_in_flight(self, worker: str) -> int:
        """Pieces offered to `worker` and neither delivered nor dropped."""
        ...

    def close(self) -> None:
        """Drop all pieces and end the transfer threads. Blocks until they have ended."""
        ...
