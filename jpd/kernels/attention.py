"""Attention over a paged KV cache, behind one interface.

`paged_attention` serves prefill chunks (T tokens) and decode (T = 1) alike. Knows nothing of
models; called by `jpd.nn` inside jit. Shape letters: see `jpd.nn`. A page holds `page_size`
consecutive positions of one sequence; `page_table[b, i]` is the page of positions i * page_size and
up. What lies beyond `kv_lengths[b]` is never attended to, so any page may pad the table.
"""

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import Mesh, PartitionSpec

from jpd.kernels.backends import AttentionBackend
from jpd.kernels.batch_attention import attend_rows_at_once
from jpd.kernels.block_attention import attend_in_blocks
from jpd.kernels.cudnn_attention import attend_with_cudnn
from jpd.kernels.reference_attention import attend_all
from jpd.kernels.scores import AttentionSettings
from jpd.kernels.tpu_attention import attend_with_tpu_kernel

Attend = Callable[..., jax.Array]

QUERIES = PartitionSpec(None, None, "tensor", "replica", None)  # [B, T, K, G, H]
PAGES = PartitionSpec(None, None, "tensor", None)  # [P, p, K, W]


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
    backend: AttentionBackend = AttentionBackend(),  # noqa: B008 (frozen)
) -> jax.Array:  # [B, T, K, G, value width]
    """Causal attention of each row's queries over its own pages, softmax in float32.

    Keys are the first H columns of a page, values the rest, or `value_columns`. The positions of a
    row's real queries stand first and ascend by one; what comes out for padding has no meaning.
    """
    columns = value_columns or (queries.shape[-1], pages.shape[-1])
    settings = AttentionSettings(scale, sliding_window, softcap, columns)
    operands = (queries, pages, page_table, query_positions, kv_lengths)
    match backend.name:
        case "reference":
            return attend_all(*operands, sinks, settings=settings)
        case "blocks":
            out: jax.Array = jax.lax.platform_dependent(
                *operands,
                sinks,
                cpu=partial(attend_in_blocks, settings=settings),
                default=partial(attend_rows_at_once, settings=settings),
            )
            return out
        case "cudnn":
            return _by_heads(attend_with_cudnn, backend.mesh)(*operands, settings=settings)
        case "tpu_ragged":
            return _by_heads(attend_with_tpu_kernel, backend.mesh)(*operands, settings=settings)


def _by_heads(attend: Attend, mesh: Mesh | None) -> Attend:
    """Each device calls the kernel for the heads that it holds."""
    if mesh is None or mesh.size == 1:
        return attend

    def mapped(*operands: jax.Array, settings: AttentionSettings) -> jax.Array:
        everywhere = PartitionSpec()
        out: jax.Array = jax.shard_map(
            partial(attend, settings=settings),
            mesh=mesh,
            in_specs=(QUERIES, PAGES, everywhere, everywhere, everywhere),
            out_specs=QUERIES,
            check_vma=False,  # kernels say nothing of how their results vary
        )(*operands)
        return out

    return mapped


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
