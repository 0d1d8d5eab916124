"""What one prefill call computes: a chunk of prompt tokens, in rows that are parts of prompts.

Built on the host for every call, a struct of arrays inside jit. Twin of decode_state.py. Knows no
attempts. Used by the prefill engine and by `jpd.engine.functions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jpd.cache.page_allocator import BIN_PAGE
from jpd.engine.buckets import ChunkShape
from jpd.engine.sampling import SamplingRows, greedy_rows, on_host


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """R rows of T tokens with tables of W pages, all padded."""

    tokens: jax.Array  # int32 [R, T]
    start: jax.Array  # int32 [R]: position of the first token
    num_valid: jax.Array  # int32 [R]
    page_table: jax.Array  # int32 [R, W]
    is_last: jax.Array  # bool [R]: the prompt ends here, a token is sampled after it
    last_position: jax.Array  # int32 [R]: where the last allowed token stands
    sampling: SamplingRows


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A part of one prompt, on the host."""

    token_ids: Sequence[int]
    start: int
    page_ids: Sequence[int]  # of the sequence, from its first page on
    is_last: bool
    last_position: int
    sampling: SamplingRows  # of one row


def prompt_rows(
    token_ids: Sequence[int],
    start: int,
    num_tokens: int,
    row_length: int,
    page_ids: Sequence[int],
    sampling: SamplingRows,
    last_position: int,
) -> list[ChunkRow]:
    """num_tokens of a whole prompt from position `start` on, cut in rows; all but one are full."""
    end = start + num_tokens
    return [
        ChunkRow(
            token_ids=token_ids[first : min(first + row_length, end)],
            start=first,
            page_ids=page_ids,
            is_last=min(first + row_length, end) == len(token_ids),
            last_position=last_position,
            sampling=sampling,
        )
        for first in range(start, end, row_length)
    ]


def empty_chunk(shape: ChunkShape) -> PrefillChunk:
    """A chunk of this shape without a valid token, on the host; every row samples."""
    return PrefillChunk(
        tokens=on_host(np.zeros((shape.num_rows, shape.row_length), np.int32)),
        start=on_host(np.zeros(shape.num_rows, np.int32)),
        num_valid=on_host(np.zeros(shape.num_rows, np.int32)),
        page_table=on_host(np.full((shape.num_rows, shape.width), BIN_PAGE, np.int32)),
        is_last=on_host(np.ones(shape.num_rows, np.bool_)),
        last_position=on_host(np.zeros(shape.num_rows, np.int32)),
        sampling=greedy_rows(shape.num_rows),
    )


def make_chunk(shape: ChunkShape, rows: Sequence[ChunkRow]) -> PrefillChunk:
    """These rows in a chunk of this shape, on the host; the rows that are left stay empty."""
    num_empty = shape.num_rows - len(rows)
    tokens = np.zeros((shape.num_rows, shape.row_length), np.int32)
    page_table = np.full((shape.num_rows, shape.width), BIN_PAGE, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row.token_ids)] = row.token_ids
        used = row.page_ids[: shape.width]
        page_table[index, : len(used)] = used
    empty = (greedy_rows(num_empty),) if num_empty else ()
    sampling: SamplingRows = jax.tree.map(
        lambda *parts: on_host(np.concatenate(parts)), *(row.sampling for row in rows), *empty
    )
    return PrefillChunk(
        tokens=on_host(tokens),
        start=_column([row.start for row in rows], num_empty),
        num_valid=_column([len(row.token_ids) for row in rows], num_empty),
        page_table=on_host(page_table),
        is_last=on_host(np.array([*(row.is_last for row in rows), *[False] * num_empty], np.bool_)),
        last_position=_column([row.last_position for row in rows], num_empty),
        sampling=sampling,
    )


def _column(values: list[int], num_empty: int) -> jax.Array:
    return on_host(np.array(values + [0] * num_empty, np.int32))
