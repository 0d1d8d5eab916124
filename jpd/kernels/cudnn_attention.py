"""Paged attention by cuDNN, through `jax.nn.dot_product_attention` over gathered pages.

Keys and values of all rows are gathered to the width of the page table: memory follows rows x
longest row, scores are never in memory. Where it works: `jpd.kernels.backends`. Never run on a GPU
so far: tests compare the same call with XLA's implementation, and lower it for CUDA.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jpd.kernels.scores import AttentionSettings, visible


def attend_with_cudnn(
    queries: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    query_positions: jax.Array,
    kv_lengths: jax.Array,
    *,
    settings: AttentionSettings,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """See `paged_attention`; without sinks and soft cap."""
    num_rows, num_queries, kv_heads, group, head_dim = queries.shape
    found = pages[page_table].astype(queries.dtype)  # [B, pages, p, K, W]
    found = found.reshape(num_rows, -1, *pages.shape[2:])
    low, high = settings.value_columns
    positions = jnp.arange(found.shape[1], dtype=jnp.int32)
    mask = visible(query_positions, positions, kv_lengths, settings.sliding_window)
    out = jax.nn.dot_product_attention(
        queries.reshape(num_rows, num_queries, kv_heads * group, head_dim),
        found[..., :head_dim],
        found[..., low:high],
        mask=mask[:, None],
        scale=settings.scale,
        implementation=implementation,
    )
    return out.reshape(num_rows, num_queries, kv_heads, group, high - low)
