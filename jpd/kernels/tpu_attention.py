"""Paged attention by JAX's ragged paged kernel for TPUs, which reads the pages where they are.

Its layout is ours: [K | V] of a head side by side are its interleaved heads. Where it works:
`jpd.kernels.backends`. Never run on a TPU so far: tests compare the same operands with the kernel's
own reference, and lower it for one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from jpd.kernels.scores import AttentionSettings

KEYS_PER_BLOCK = 512
QUERIES_PER_BLOCK = 64
VMEM_BYTES = 64 << 20


def attend_with_tpu_kernel(
    queries: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    query_positions: jax.Array,
    kv_lengths: jax.Array,
    *,
    settings: AttentionSettings,
) -> jax.Array:
    """See `paged_attention`; without sinks, values must be the columns after the keys.

    Padding queries follow a row's real ones and see garbage, which has no meaning.
    """
    ragged = ragged_operands(queries, pages, page_table, query_positions)
    num_pages = ragged[3].shape[1]
    out: jax.Array = ragged_paged_attention(
        *ragged,
        **kernel_settings(settings),
        num_kv_pages_per_block=min(num_pages, max(1, KEYS_PER_BLOCK // pages.shape[1])),
        num_queries_per_block=min(QUERIES_PER_BLOCK, ragged[0].shape[0]),
        vmem_limit_bytes=VMEM_BYTES,
    )
    return out.reshape(queries.shape)


def kernel_settings(settings: AttentionSettings) -> dict[str, Any]:
    """As the kernel and its reference call them."""
    return {
        "sm_scale": settings.scale,
        "sliding_window": settings.sliding_window,
        "soft_cap": settings.softcap or None,
    }


def ragged_operands(
    queries: jax.Array, pages: jax.Array, page_table: jax.Array, query_positions: jax.Array
) -> tuple[jax.Array, ...]:
    """What the kernel takes: every row as a sequence whose last T tokens are its T queries.

    The padded length start + T stands for the real one: no real query sees beyond itself. The table
    is widened by the bin page as far as padding reaches.
    """
    num_rows, num_queries, kv_heads, group, head_dim = queries.shape
    num_pages, page_size = pages.shape[:2]
    extra = -(-num_queries // page_size)
    return (
        queries.reshape(num_rows * num_queries, kv_heads * group, head_dim),
        pages.reshape(num_pages, page_size, 2 * kv_heads, head_dim),
        query_positions[:, 0] + num_queries,
        jnp.pad(page_table, ((0, 0), (0, extra))),
        jnp.arange(num_rows + 1, dtype=jnp.int32) * num_queries,
        jnp.array([num_rows], jnp.int32),
    )
