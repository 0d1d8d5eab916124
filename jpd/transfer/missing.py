"""What one attempt still lacks of its KV: which layers of which pages.

Pieces come in any order, and in any cut of layers and pages; each part is taken once. Pure
bookkeeping, held by whoever waits: the decode role, and the prefill role for what comes back.
"""

from jpd.transfer.protocol import PieceRange


class MissingKV:
    """Pages count in the sequence."""

    def __init__(self, pages: range, num_layers: int) -> None:
        self._layers = dict.fromkeys(pages, _bits(range(num_layers)))  # page → a bit for each layer

    @property
    def num_pages(self) -> int:
        """That lack any layer."""
        return len(self._layers)

    @property
    def is_nothing(self) -> bool:
        return not self._layers

    def covers(self, piece: PieceRange) -> bool:
        """Whether all of the piece is missing; a piece of no pages is never."""
        bits = _bits(piece.layers)
        held = (self._layers.get(page, 0) for page in piece.pages)
        return piece.num_pages > 0 and all(bits & found == bits for found in held)

    def take(self, piece: PieceRange) -> None:
        """What the piece has is here now. Only when it is covered."""
        bits = _bits(piece.layers)
        for page in piece.pages:
            left = self._layers[page] & ~bits
            if left:
                self._layers[page] = left
            else:
                del self._layers[page]

    def clear(self) -> None:
        """Everything is here."""
        self._layers.clear()


def _bits(layers: range) -> int:
    return ((1 << len(layers)) - 1) << layers.start
