"""Where pages leave a worker's pool as pieces, in the form that each destination takes.

Twice in use: a prefill engine sends what it computed, a decode worker what it is asked for. Knows
no owners and no transport. Called on the worker's thread.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from jpd.cache.kv_cache import KVCache
from jpd.engine.page_moves import Arrays, PageMoves
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

    def check_groups(self, num_groups: int) -> None:
        """Raises ValueError unless every wire is cut in as many layer groups as are computed."""
        for name, wire in self._wires.items():
            if wire.layer_groups != num_groups:
                cut = f"{wire.layer_groups} layer groups on the wire to {name}"
                raise ValueError(f"{cut}, {num_groups} are computed")

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
        group: int | None = None,
    ) -> None:
        """Gather and emit the sequence's pages from `start` to `end`, counted as on the wire.

        `page_ids` are the sequence's in this pool. `is_end`: the last piece is the attempt's last.
        `group`: only these layers, by their group's number on the wire; None: all, group by group.
        """
        wire = self._wires[destination]
        ranges = wire.layer_ranges(self._cache.spec.num_layers)
        for layers in ranges if group is None else ranges[group : group + 1]:
            first = start
            for num_pages in wire.split(max(0, end - start)):
                arrays = self._moves.gather(self._cache, page_ids, wire, first, num_pages, layers)
                is_last = is_end and layers == ranges[-1] and first + num_pages == end
                pages = range(first, first + num_pages)
                self._emit(self._piece(attempt_id, destination, layers, pages, arrays, is_last))
                first += num_pages

    def refuse(self, attempt_id: str, destination: str, start: int) -> None:
        """Tell the destination that the pages from `start` on, which it asked for, are not here."""
        layers, nothing = self._cache.spec.all_layers, range(start, start)
        self._emit(self._piece(attempt_id, destination, layers, nothing, (), is_last=True))

    def _piece(
        self,
        attempt_id: str,
        destination: str,
        layers: range,
        pages: range,
        arrays: Arrays,
        is_last: bool,
    ) -> KVPiece:
        wire, spec = self._wires[destination], self._cache.spec
        return KVPiece(
            attempt_id=attempt_id,
            layer_start=layers.start,
            num_layers=len(layers),
            page_start=pages.start,
            num_pages=len(pages),
            destination=destination,
            arrays=arrays,
            wire=wire,
            num_bytes=wire.num_bytes(len(pages)) * len(layers) // spec.num_layers,
            is_last=is_last,
            offered_time=time.monotonic(),
        )
