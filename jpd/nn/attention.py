"""Grouped-query attention of one layer: projections, rope, writing pages, attending over them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jpd.kernels.attention import paged_attention, write_pages
from jpd.kernels.backends import AttentionBackend
from jpd.nn.config import DecoderConfig, LayerConfig
from jpd.nn.layers import RMSNorm, param
from jpd.nn.linear import Linear
from jpd.nn.rope import RopeTables, apply_rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Placement:
    """Where the tokens of one call stand: the same for all layers, so computed once."""

    positions: jax.Array  # int32 [B, T]
    page_table: jax.Array  # int32 [B, pages of a sequence]
    kv_lengths: jax.Array  # int32 [B], this call's tokens included
    page_ids: jax.Array  # int32 [B, T]: page each token is written to; 0 for padding
    offsets: jax.Array  # int32 [B, T]: its place in that page


class Attention(nnx.Module):
    """Queries carry kv heads and groups as two axes: no reshape ever crosses a sharding."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        dtype: jnp.dtype,
        backend: AttentionBackend,
    ) -> None:
        embed, kv_heads, head = config.embed_dim, config.num_kv_heads, config.head_dim
        group = config.num_heads // kv_heads
        q_shape, q_axes = (kv_heads, group, head), ("kv_heads", "group", "head_dim")
        k_shape, k_axes = (kv_heads, head), ("kv_heads", "head_dim")
        into_q, into_k = ((embed, *shape) for shape in (q_shape, k_shape))
        q_in_axes, k_in_axes = ("embed", *q_axes), ("embed", *k_axes)
        out, out_axes = (*q_shape, embed), (*q_axes, "embed")
        int8 = config.weights == "int8"
        self.q = Linear("btd,dkgh->btkgh", into_q, dtype, q_in_axes, int8=int8)
        self.k = Linear("btd,dkh->btkh", into_k, dtype, k_in_axes, int8=int8)
        self.v = Linear("btd,dkh->btkh", into_k, dtype, k_in_axes, int8=int8)
        self.o = Linear("btkgh,kghd->btd", out, dtype, out_axes, int8=int8)
        if config.qkv_bias:
            self.q_bias = param(q_shape, dtype, q_axes)
            self.k_bias = param(k_shape, dtype, k_axes)
            self.v_bias = param(k_shape, dtype, k_axes)
        if config.o_bias:
            self.o_bias = param((embed,), dtype, ("embed",))
        if config.attention_sinks:
            self.sinks = param((kv_heads, group), dtype, ("kv_heads", "group"))
        if config.qk_norm != "none":
            skip = 0 if config.qk_norm == "full" else -1
            norm = {"eps": config.norm_eps, "offset": config.norm_offset}
            self.q_norm = RMSNorm(q_shape[skip:], dtype, q_axes[skip:], **norm)
            self.k_norm = RMSNorm(k_shape[skip:], dtype, k_axes[skip:], **norm)
        self.config, self.layer, self.backend = config, layer, backend

    def __call__(
        self, x: jax.Array, tables: RopeTables | None, pages: jax.Array, place: Placement
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] → the same shape, and the pages with this call's keys and values."""
        config, rope = self.config, self.layer.rope
        q, k, v = self._project(x)
        if config.qk_norm != "none":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, tables, rope), apply_rope(k, tables, rope)
        pages = write_pages(pages, jnp.concatenate([k, v], -1), place.page_ids, place.offsets)
        attended = paged_attention(
            q,
            pages,
            place.page_table,
            place.positions,
            place.kv_lengths,
            scale=config.attention_scale,
            sliding_window=self.layer.sliding_window,
            softcap=config.attention_softcap,
            sinks=self.sinks[...] if config.attention_sinks else None,
            backend=self.backend,
        )
        out = self.o(attended)
        return (out + self.o_bias[...] if config.o_bias else out), pages

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.config.qkv_bias:
            return q + self.q_bias[...], k + self.k_bias[...], v + self.v_bias[...]
        return q, k, v
