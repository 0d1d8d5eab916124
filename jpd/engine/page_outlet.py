"""Where pages leave a worker's pool as pieces, in the form that each destination takes.

Twice in use: a prefill engine sends what it computed, a decode worker what it is asked for. Knows
no owners and no transport. Called on the worker's thread.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from jpd.cache.kv_cache import KVCache
from jpd.engine.page_moves import PageMoves
from jpd.transfer.protocol import KVPiece
from jpd.transfer.wire import Wire


class PageOutlet:
    """Gathers pages of one pool and emits them."""

    def __init__(
        self,
        moves: PageMoves,
        cache: KVCache,
        emit: Callable[[KVPiece], None],
        wires: Mapping[str, Wire],
    ) -> None:
        """`wires`: for each destination, how KV travels to it."""
        self._moves, self._cache, self._emit = moves, cache, emit
        self._wires = dict(wires)

    def warm_up(self) -> None:
        """Compile the gathers of every destination and bucket."""
        self._moves.warm_up_gather(self._cache, self._wires.values())

    def learn_destination(self, name: str, like: str) -> None:
        """KV for this new destination travels as that for the other one: nothing is compiled."""
        self._wires[name] = self._wires[like]

    def __contains__(self, destination: str) -> bool:
        return destination in self._wires

    def page_size(self, destination: str) -> int:
        """Tokens of a page on the way there."""
        return self._wires[destination].page_size

    def send(
        self,
        attempt_id: str,
        destination: str,
        page_ids: Sequence[int],
        start: int,
        end: int,
        *,
        is_end: bool,
    ) -> None:
        """Gather and emit the sequence's pages from `start` to `end`, counted as on the wire.

        `page_ids` are the sequence's in this pool. `is_end`: the last piece is the attempt's last.
        """
        wire = self._wires[destination]
        for num_pages in wire.split(max(0, end - start)):
            piece = KVPiece(
                attempt_id=attempt_id,
                destination=destination,
                page_start=start,
                num_pages=num_pages,
                arrays=self._moves.gather(self._cache, page_ids, wire, start, num_pages),
                wire=wire,
                num_bytes=wire.num_bytes(num_pages),
                is_last=is_end and start + num_pages == end,
                offered_time=time.monotonic(),
            )
            self._emit(piece)
            start += num_pages

    def refuse(self, attempt_id: str, destination: str, start: int) -> None:
        """Tell the destination that the pages from `start` on, which it asked for, are not here."""
        wire = self._wires[destination]
        self._emit(KVPiece(attempt_id, destination, start, 0, (), wire, 0, True, time.monotonic()))
