"""Which parts of which prompts share a prefill chunk.

A chunk is cut in rows. A prompt takes as many rows as it needs, so that a long one fills a chunk
and several short ones share one. The layout is the one that computes the most tokens per second.
Pure arithmetic. Called by the prefill engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jpd.engine.buckets import ChunkLayout


@dataclass(frozen=True, slots=True)
class Packing:
    """A layout, and how many tokens of each prompt are computed in it."""

    layout: ChunkLayout
    num_tokens: tuple[int, ...]  # of the first prompts, in their order; all above 0


def pack(
    num_left: Sequence[int],
    layouts: Sequence[ChunkLayout],
    seconds: Callable[[ChunkLayout], float],
) -> Packing:
    """Pack prompts that have so many tokens left, given in the order in which they are due.

    The first prompt is never cut where a larger layout holds all of it. `layouts` ascend by size.
    """
    sizes = [layout.num_tokens for layout in layouts]
    needed = min(num_left[0], sizes[-1])
    packings = [
        _fill(num_left, layout)
        for layout, size in zip(layouts, sizes, strict=True)
        if size >= needed
    ]
    return max(
        reversed(packings),  # of equals the largest
        key=lambda packing: sum(packing.num_tokens) / seconds(packing.layout),
    )


def _fill(num_left: Sequence[int], layout: ChunkLayout) -> Packing:
    num_free, taken = layout.num_rows, []
    for num_tokens in num_left:
        if num_free == 0:
            break
        taken.append(min(num_tokens, num_free * layout.row_length))
        num_free -= -(-taken[-1] // layout.row_length)
    return Packing(layout, tuple(taken))
