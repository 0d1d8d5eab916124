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
from jpd.engine.sampling_rows import SamplingRows, greedy_rows, on_host


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """R rows of T tokens with tables of W pages, all padded."""

    tokens: jax.Array  # int32 [R, T]
    start: jax.Array  # int32 [R]: position of the first token
    num_valid: jax.Array  # int32 [R]
    page_table: jax.Array  # int32 [R, W]
    next_token: jax.Array  # int32 [R]: of the prompt, after the row's last one; 0 at its end


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class ChunkEnds:
    """What follows the rows of a chunk. H tokens of the longest sequence."""

    position: jax.Array  # int32 [R]: where the token after the row's last one stands
    is_last: jax.Array  # bool [R]: the prompt ends here, a token is chosen after it
    last_position: jax.Array  # int32 [R]: where the last allowed token stands
    sampling: SamplingRows
    history: jax.Array  # int32 [R, H]: all tokens of the prompts that penalties ask for


@dataclass(frozen=True, slots=True)
class ChunkPrompt:
    """One prompt, on the host: what the rows of all its chunks are made of."""

    token_ids: Sequence[int]
    page_ids: Sequence[int]  # of the sequence, from its first page on
    sampling: SamplingRows  # of one row
    last_position: int
    has_penalties: bool = False
    wants_logprobs: bool = False  # of its own tokens


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """A part of one prompt, on the host."""

    prompt: ChunkPrompt
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        return self.end == len(self.prompt.token_ids)

    @property
    def next_token(self) -> int:
        return 0 if self.is_last else self.prompt.token_ids[self.end]


def prompt_rows(
    prompt: ChunkPrompt, start: int, num_tokens: int, row_length: int
) -> list[ChunkRow]:
    """num_tokens of a prompt from position `start` on, cut in rows; all but one are full."""
    end = start + num_tokens
    return [
        ChunkRow(prompt, first, min(first + row_length, end))
        for first in range(start, end, row_length)
    ]


def empty_chunk(shape: ChunkShape, history: jax.Array) -> tuple[PrefillChunk, ChunkEnds]:
    """A chunk of this shape without a valid token, on the host; every row samples."""
    chunk = PrefillChunk(
        tokens=on_host(np.zeros((shape.num_rows, shape.row_length), np.int32)),
        start=on_host(np.zeros(shape.num_rows, np.int32)),
        num_valid=on_host(np.zeros(shape.num_rows, np.int32)),
        page_table=on_host(np.full((shape.num_rows, shape.width), BIN_PAGE, np.int32)),
        next_token=on_host(np.zeros(shape.num_rows, np.int32)),
    )
    ends = ChunkEnds(
        position=on_host(np.zeros(shape.num_rows, np.int32)),
        is_last=on_host(np.ones(shape.num_rows, np.bool_)),
        last_position=on_host(np.zeros(shape.num_rows, np.int32)),
        sampling=greedy_rows(shape.num_rows),
        history=history,
    )
    return chunk, ends


def make_chunk(
    shape: ChunkShape, rows: Sequence[ChunkRow], no_history: jax.Array
) -> tuple[PrefillChunk, ChunkEnds]:
    """These rows in a chunk of this shape, on the host; the rows that are left stay empty.

    no_history, of `ModelFunctions`, stands in where no row has one.
    """
    num_empty = shape.num_rows - len(rows)
    tokens = np.zeros((shape.num_rows, shape.row_length), np.int32)
    page_table = np.full((shape.num_rows, shape.width), BIN_PAGE, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : row.num_tokens] = row.prompt.token_ids[row.start : row.end]
        used = row.prompt.page_ids[: shape.width]
        page_table[index, : len(used)] = used
    chunk = PrefillChunk(
        tokens=on_host(tokens),
        start=_column([row.start for row in rows], num_empty),
        num_valid=_column([row.num_tokens for row in rows], num_empty),
        page_table=on_host(page_table),
        next_token=_column([row.next_token for row in rows], num_empty),
    )
    return chunk, _make_ends(rows, num_empty, no_history)


def _make_ends(rows: Sequence[ChunkRow], num_empty: int, no_history: jax.Array) -> ChunkEnds:
    empty = (greedy_rows(num_empty),) if num_empty else ()
    sampling: SamplingRows = jax.tree.map(
        lambda *parts: on_host(np.concatenate(parts)),
        *(row.prompt.sampling for row in rows),
        *empty,
    )
    return ChunkEnds(
        position=_column([row.end for row in rows], num_empty),
        is_last=on_host(np.array([row.is_last for row in rows] + [False] * num_empty, np.bool_)),
        last_position=_column([row.prompt.last_position for row in rows], num_empty),
        sampling=sampling,
        history=_histories(rows, no_history),
    )


def _histories(rows: Sequence[ChunkRow], no_history: jax.Array) -> jax.Array:
    """Whole prompts in the rows that sample with penalties."""
    wanted = {
        index: row.prompt.token_ids
        for index, row in enumerate(rows)
        if row.is_last and row.prompt.has_penalties
    }
    if not wanted:
        return no_history
    histories = np.zeros(no_history.shape, np.int32)
    for index, token_ids in wanted.items():
        histories[index, : len(token_ids)] = token_ids
    return on_host(histories)


def _column(values: list[int], num_empty: int) -> jax.Array:
    return on_host(np.array(values + [0] * num_empty, np.int32))
