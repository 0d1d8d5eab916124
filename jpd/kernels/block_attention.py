"""Paged attention for CPU: one row and a block of its queries at a time, over blocks of its pages.

A block of pages fits in a core's cache, so the KV cache crosses the memory bus once. The running
softmax needs no second pass. Blocks that a row has not filled, that its queries all precede or that
its window has left behind are not read: cost follows each row's own length, not the longest.
Chosen by `jpd.kernels.attention`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpd.kernels.running_softmax import Softmax, add_block, empty, finish
from jpd.kernels.scores import AttentionSettings, masked_scores, visible

KEYS_PER_BLOCK = 128
"""A row's last block is read whole, and is mostly not full."""

KEYS_PER_QUERY_BLOCK = 32
"""Of a single query: its products are so small that XLA would spread larger ones over threads that
then mostly wait for each other."""

QUERIES_PER_BLOCK = 128
"""Of the blocks that only some of its queries see, half is computed for nothing."""


class _Queries(NamedTuple):
    """Queries of one row that are computed together."""

    queries: jax.Array  # [K, G, T, H]: as products want them, turned once for all blocks of keys
    positions: jax.Array  # int32 [T]
    page_table: jax.Array  # int32 [pages of the sequence]
    kv_length: jax.Array  # int32


def attend_in_blocks(
    queries: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    query_positions: jax.Array,
    kv_lengths: jax.Array,
    sinks: jax.Array | None,
    *,
    settings: AttentionSettings,
) -> jax.Array:
    """See `paged_attention`."""
    num_rows, num_queries = query_positions.shape
    width = min(num_queries, QUERIES_PER_BLOCK)
    missing = -num_queries % width
    if missing:
        queries = jnp.pad(queries, ((0, 0), (0, missing), *((0, 0),) * 3))
        query_positions = jnp.pad(query_positions, ((0, 0), (0, missing)), mode="edge")
    per_row = (num_queries + missing) // width
    blocks = _Queries(
        jnp.transpose(
            queries.reshape(num_rows * per_row, width, *queries.shape[2:]), (0, 2, 3, 1, 4)
        ),
        query_positions.reshape(num_rows * per_row, width),
        jnp.repeat(_whole_blocks(page_table, pages.shape[1], width), per_row, axis=0),
        jnp.repeat(kv_lengths, per_row),
    )
    out = jax.lax.map(lambda block: _attend(block, pages, sinks, settings), blocks)
    joined: jax.Array = out.reshape(num_rows, num_queries + missing, *out.shape[2:])
    return joined[:, :num_queries]


def _pages_per_block(num_pages: int, page_size: int, num_queries: int) -> int:
    num_keys = KEYS_PER_QUERY_BLOCK if num_queries == 1 else KEYS_PER_BLOCK
    return min(num_pages, max(1, num_keys // page_size))


def _whole_blocks(page_table: jax.Array, page_size: int, num_queries: int) -> jax.Array:
    """The table widened to whole blocks with page 0, which is masked like all not written."""
    num_pages = page_table.shape[1]
    missing = -num_pages % _pages_per_block(num_pages, page_size, num_queries)
    return jnp.pad(page_table, ((0, 0), (0, missing)))


def _attend(
    block: _Queries, pages: jax.Array, sinks: jax.Array | None, settings: AttentionSettings
) -> jax.Array:  # [T, K, G, value width]
    page_size, num_pages = pages.shape[1], block.page_table.shape[0]
    kv_heads, group, width = block.queries.shape[:3]
    per_block = _pages_per_block(num_pages, page_size, width)
    num_keys = per_block * page_size
    low, high = settings.value_columns

    def add(i: jax.Array | int, state: Softmax) -> Softmax:
        page_ids = jax.lax.dynamic_slice_in_dim(block.page_table, i * per_block, per_block)
        return _add_keys(state, block, pages, page_ids, i * num_keys, settings)

    state = empty((kv_heads, group, width), high - low)
    if num_pages == per_block:
        state = add(0, state)
    else:
        first, last = _reach(block, settings.sliding_window)
        end = (last + num_keys) // num_keys
        state = jax.lax.fori_loop(first // num_keys, end, add, state)
    out = finish(state, sinks)
    return jnp.transpose(out, (2, 0, 1, 3)).astype(block.queries.dtype)


def _reach(block: _Queries, sliding_window: int | None) -> tuple[jax.Array, jax.Array]:
    """The first and the last key position that any query of the block can see."""
    last = jnp.minimum(block.positions[-1], block.kv_length - 1)
    if sliding_window is None:
        return jnp.zeros_like(last), last
    return jnp.maximum(block.positions[0] - sliding_window + 1, 0), last


def _add_keys(
    state: Softmax,
    block: _Queries,
    pages: jax.Array,
    page_ids: jax.Array,
    first_position: jax.Array | int,
    settings: AttentionSettings,
) -> Softmax:
    """Take the keys and values of some pages into the running softmax."""
    queries = block.queries
    keys = _columns(pages, page_ids, 0, queries.shape[-1]).astype(queries.dtype)
    values = _columns(pages, page_ids, *settings.value_columns).astype(queries.dtype)
    products = _products(queries, keys)
    key_positions = first_position + jnp.arange(keys.shape[1], dtype=jnp.int32)
    mask = visible(block.positions, key_positions, block.kv_length, settings.sliding_window)
    scores = masked_scores(products, mask, settings)

    def weigh(weights: jax.Array) -> jax.Array:
        narrow, wide = weights.astype(queries.dtype), jnp.float32
        return jnp.einsum("kgts,ksh->kgth", narrow, values, preferred_element_type=wide)

    return add_block(state, scores, weigh)


def _products(queries: jax.Array, keys: jax.Array) -> jax.Array:  # float32 [K, G, T, S]
    """The smaller operand goes second, where XLA turns it around before it multiplies."""
    if queries.shape[2] > 1:
        return jnp.einsum("kgth,ksh->kgts", queries, keys, preferred_element_type=jnp.float32)
    turned = jnp.einsum("ksh,kgth->ksgt", keys, queries, preferred_element_type=jnp.float32)
    return jnp.moveaxis(turned, 1, -1)


def _columns(pages: jax.Array, page_ids: jax.Array, low: int, high: int) -> jax.Array:
    """[K, S, columns] of some pages. Keys and values are each gathered on their own.

    One gather of whole rows, cut afterwards, would have both copied a second time. A slice by page
    is quicker still, but XLA's CPU compiler cannot translate some fusions of it (JAX 0.10).
    """
    corners = jnp.stack([page_ids, jnp.full_like(page_ids, low)], axis=-1)
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(1, 2, 3), collapsed_slice_dims=(0,), start_index_map=(0, 3)
    )
    sizes = (1, *pages.shape[1:3], high - low)
    found = jax.lax.gather(pages, corners, numbers, sizes, mode="promise_in_bounds")
    return jnp.transpose(found.reshape(-1, *found.shape[2:]), (1, 0, 2))
