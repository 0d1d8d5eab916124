"""Paged attention in plain jax.numpy, all rows and all their keys at once.

Its cost follows the width of the page table, except that a layer with a sliding window reads only
the pages which the window reaches. Runs on every platform; chosen by `jpd.kernels.attention`.
"""

import jax
import jax.numpy as jnp

from jpd.kernels.scores import AttentionSettings, masked_scores, visible


def attend_all(
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
    head_dim = queries.shape[-1]
    page_table, first_positions = _pages_in_window(
        page_table, query_positions, pages.shape[1], settings.sliding_window
    )
    keys_values = pages[page_table]  # [B, pages, p, K, W]
    keys_values = keys_values.reshape(keys_values.shape[0], -1, *pages.shape[2:])
    keys_values = keys_values.astype(queries.dtype)
    products = jnp.einsum(
        "btkgh,bskh->bkgts",
        queries,
        keys_values[..., :head_dim],
        preferred_element_type=jnp.float32,
    )
    key_positions = first_positions[:, None] + jnp.arange(keys_values.shape[1], dtype=jnp.int32)
    mask = visible(query_positions, key_positions, kv_lengths, settings.sliding_window)
    weights = _softmax(masked_scores(products, mask[:, None, None], settings), sinks)
    low, high = settings.value_columns
    return jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(queries.dtype), keys_values[..., low:high]
    )


def _pages_in_window(
    page_table: jax.Array, query_positions: jax.Array, page_size: int, sliding_window: int | None
) -> tuple[jax.Array, jax.Array]:
    """The part of the table that a row's windows reach, and the position where it begins."""
    whole = page_table, jnp.zeros_like(query_positions[:, 0])
    if sliding_window is None:
        return whole
    num_positions = sliding_window + query_positions.shape[1] - 1
    # num_positions in a row touch this many pages at most, wherever they begin:
    num_pages = (num_positions - 2) // page_size + 2
    if num_pages >= page_table.shape[1]:
        return whole
    first_pages = (query_positions[:, 0] - sliding_window + 1) // page_size
    first_pages = jnp.clip(first_pages, 0, page_table.shape[1] - num_pages)
    columns = first_pages[:, None] + jnp.arange(num_pages, dtype=jnp.int32)
    return jnp.take_along_axis(page_table, columns, axis=1), first_pages * page_size


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:  # [B, K, G, T, S]
    """Softmax over S; a sink takes part in the sum but carries no value."""
    highest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is None:
        weights = jnp.exp(scores - highest)
        return weights / jnp.sum(weights, axis=-1, keepdims=True)
    sink_scores = sinks.astype(jnp.float32)[None, :, :, None, None]
    highest = jnp.maximum(highest, sink_scores)
    weights = jnp.exp(scores - highest)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink_scores - highest))
