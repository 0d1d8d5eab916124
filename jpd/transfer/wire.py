"""The form that KV pages have between two pools: how they are split, sized and written down.

Pure numbers, equal for all pairs of workers of a kind, so that those share executables. Worked out
by the launcher from a TransferPlan; read by the source's gather, the transport and the
destination's scatter.
"""

from dataclasses import dataclass, replace

from jpd.nn.layer_groups import layer_ranges


@dataclass(frozen=True, slots=True)
class Wire:
    """How pages travel to one destination.

    The arrays of a piece are those of the first slice, one or two for each of its layers and at
    last the checksum if there is one, then those of the next slice; on arrival likewise strand by
    strand.
    All have four axes and are split along the third, as pools are: pages [n, p, K, W] as stored, or
    int8 and their float32 scales [n, p, K, parts]; the checksum is uint32 [1, 1, parts, 1].
    """

    partitions: int  # parts of the head axis in which pages leave the source's mesh
    page_size: int  # tokens of a page on the wire: the destination's
    move_sizes: tuple[int, ...]  # pages of one piece, padded up to one of these; ascending
    token_bytes: int  # on the wire, all layers and heads, once
    dtype: str  # int8: quantised, with scales
    slices: int = 1  # each part is cut in so many, one for each target device that needs only that
    strands: int = 1  # so many parts make one of the target's: they are joined where it is
    has_checksum: bool = False
    layer_groups: int = 1  # a run of pages is so many pieces, each of some layers

    def __str__(self) -> str:
        cut = f", each cut in {self.slices}" if self.slices > 1 else ""
        cut += f", joined by {self.strands} on arrival" if self.strands > 1 else ""
        checked = ", with checksums" if self.has_checksum else ""
        checked += f", {self.layer_groups} groups of layers" if self.layer_groups > 1 else ""
        return (
            f"{self.partitions} parts{cut}, pages of {self.page_size} tokens as {self.dtype}"
            f"{checked}, {self.token_bytes:,} bytes a token"
        )

    @property
    def uncut(self) -> "Wire":
        """As it arrives: slices are put together, each already where it belongs.

        Strands are not: they arrive as slices of the target's own parts would look.
        """
        if self.strands > 1:
            parts = self.partitions // self.strands
            return replace(self, partitions=parts, slices=self.strands, strands=1)
        return replace(self, partitions=self.partitions * self.slices, slices=1)

    @property
    def arrays_per_layer(self) -> int:
        return 2 if self.dtype == "int8" else 1

    def padded(self, num_pages: int) -> int:
        """Pages of the smallest piece that holds so many."""
        for size in self.move_sizes:
            if size >= num_pages:
                return size
        raise ValueError(f"{num_pages} pages exceed the largest piece of {self.move_sizes[-1]}")

    def split(self, num_pages: int) -> tuple[int, ...]:
        """Cut a run of pages into pieces, the largest first; only the last one is padded."""
        whole, rest = divmod(num_pages, self.move_sizes[-1])
        return (self.move_sizes[-1],) * whole + ((rest,) if rest else ())

    def layer_ranges(self, num_layers: int) -> tuple[range, ...]:
        """How the layers of a model are cut, piece by piece."""
        return layer_ranges(num_layers, self.layer_groups)

    def num_bytes(self, num_pages: int) -> int:
        """Of so many pages with all layers, padding and copies for replicas not counted."""
        return num_pages * self.page_size * self.token_bytes
