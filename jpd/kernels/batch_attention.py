"""Paged attention for accelerators: all rows and queries at once, over blocks of keys.

No more scores and gathered keys are in memory than those of one block, whatever the context; time
follows the longest row of the call, or what windows reach. Twin of `block_attention`, which takes
rows in turn. Chosen by `jpd.kernels.attention`.
"""

import math

import jax
import jax.numpy as jnp

from jpd.kernels.running_softmax import Softmax, add_block, empty, finish
from jpd.kernels.scores import AttentionSettings, masked_scores, visible

NUMBERS_PER_BLOCK = 1 << 26
"""At most so many scores, or gathered numbers, at a time: 256 MiB in float32."""

MIN_KEYS_PER_BLOCK = 128


def attend_rows_at_once(
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
    num_rows, num_queries, kv_heads, group, head_dim = queries.shape
    page_size, (low, high) = pages.shape[1], settings.value_columns
    per_block = pages_per_block(queries.shape, page_table.shape[1], pages.shape)
    missing = -page_table.shape[1] % per_block
    page_table = jnp.pad(page_table, ((0, 0), (0, missing)))  # page 0, masked like all not written
    num_keys = per_block * page_size

    def add(i: jax.Array | int, state: Softmax) -> Softmax:
        page_ids = jax.lax.dynamic_slice_in_dim(page_table, i * per_block, per_block, axis=1)
        found = pages[page_ids].reshape(num_rows, num_keys, *pages.shape[2:]).astype(queries.dtype)
        keys, values = found[..., :head_dim], found[..., low:high]
        wide = jnp.float32
        products = jnp.einsum("btkgh,bskh->bkgts", queries, keys, preferred_element_type=wide)
        positions = i * num_keys + jnp.arange(num_keys, dtype=jnp.int32)
        mask = visible(query_positions, positions, kv_lengths, settings.sliding_window)
        return add_block(
            state,
            masked_scores(products, mask[:, None, None], settings),
            lambda weights: jnp.einsum(
                "bkgts,bskh->bkgth",
                weights.astype(queries.dtype),
                values,
                preferred_element_type=wide,
            ),
        )

    state = empty((num_rows, kv_heads, group, num_queries), high - low)
    if page_table.shape[1] == per_block:
        state = add(0, state)
    else:
        first, last = _reach(query_positions, kv_lengths, settings.sliding_window)
        state = jax.lax.fori_loop(first // num_keys, (last + num_keys) // num_keys, add, state)
    out = finish(state, sinks)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).astype(queries.dtype)


def pages_per_block(
    queries_shape: tuple[int, ...], num_pages: int, pages_shape: tuple[int, ...]
) -> int:
    """As many as keep a block within NUMBERS_PER_BLOCK, but not fewer than a product needs."""
    num_rows, num_queries, kv_heads, group, _ = queries_shape
    scores, gathered = num_queries * kv_heads * group, math.prod(pages_shape[2:])
    num_keys = NUMBERS_PER_BLOCK // (num_rows * max(scores, gathered))
    return min(num_pages, max(num_keys, MIN_KEYS_PER_BLOCK) // pages_shape[1] or 1)


def _reach(
    query_positions: jax.Array, kv_lengths: jax.Array, sliding_window: int | None
) -> tuple[jax.Array, jax.Array]:
    """The first and the last key position that any real query of any row can see."""
    last = jnp.minimum(query_positions[:, -1], kv_lengths - 1)
    if sliding_window is None:
        return jnp.zeros((), jnp.int32), jnp.max(last)
    # A row without tokens sees nothing and must not hold the others' beginning back.
    first = jnp.where(kv_lengths > 0, query_positions[:, 0] - sliding_window + 1, last.max())
    return jnp.maximum(jnp.min(first), 0), jnp.max(last)
