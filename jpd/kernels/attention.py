"""Attention over a paged KV cache, behind one interface.

`paged_attention` serves prefill chunks (T tokens) and decode (T = 1) alike. Knows nothing of models
or meshes; called by `jpd.nn` inside jit. Shape letters: see `jpd.nn`. A page holds `page_size`
consecutive positions of one sequence; `page_table[b, i]` is the page of positions i * page_size and
up. What lies beyond `kv_lengths[b]` is never attended to, so any page may pad the table.
"""

from functools import partial

import jax

from jpd.kernels.block_attention import attend_in_blocks
from jpd.kernels.reference_attention import attend_all
from jpd.kernels.scores import AttentionSettings


def paged_attention(
    queries: jax.Array,  # [B, T, K, G, H]
    pages: jax.Array,  # [P, p, K, W]
    page_table: jax.Array,  # int32 [B, pages of a sequence]
    query_positions: jax.Array,  # int32 [B, T]
    kv_lengths: jax.Array,  # int32 [B]
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,  # [K, G]
    value_columns: tuple[int, int] | None = None,
) -> jax.Array:  # [B, T, K, G, value width]
    """Causal attention of each row's queries over its own pages, softmax in float32.

    Keys are the first H columns of a page, values the rest, or `value_columns`. The positions of a
    row's real queries stand first and ascend by one; what comes out for padding has no meaning.
    The way is chosen when the function is compiled for a platform.
    """
    columns = value_columns or (queries.shape[-1], pages.shape[-1])
    settings = AttentionSettings(scale, sliding_window, softcap, columns)
    operands = (queries, pages, page_table, query_positions, kv_lengths, sinks)
    out: jax.Array = jax.lax.platform_dependent(
        *operands,
        cpu=partial(attend_in_blocks, settings=settings),
        default=partial(attend_all, settings=settings),
    )
    return out


def write_pages(
    pages: jax.Array,  # [P, p, K, W]
    keys_values: jax.Array,  # [B, T, K, W]
    page_ids: jax.Array,  # int32 [B, T]
    offsets: jax.Array,  # int32 [B, T]
) -> jax.Array:
    """Pages with one row per token written; in place when the caller's jit donates `pages`."""
    return pages.at[page_ids, offsets].set(
        keys_values.astype(pages.dtype), mode="promise_in_bounds"
    )
