"""Multi-head latent attention of one layer.

What is cached per token is one latent and one rotary key, shared by all heads. Keys and values are
never expanded: queries are brought into the space of the latent, attend there, and the attended
latent is brought back. That is one query group of N heads over one cached head.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jpd.kernels.attention import paged_attention, write_pages
from jpd.kernels.backends import AttentionBackend
from jpd.nn.attention import Placement
from jpd.nn.config import DecoderConfig, LayerConfig, MlaConfig
from jpd.nn.layers import Axes, RMSNorm, param
from jpd.nn.linear import Linear
from jpd.nn.rope import RopeTables, apply_rope


class LatentAttention(nnx.Module):
    """Same call as `Attention`; its pages hold [latent | rotary key]."""

    def __init__(
        self,
        config: DecoderConfig,
        mla: MlaConfig,
        layer: LayerConfig,
        dtype: jnp.dtype,
        backend: AttentionBackend,
    ) -> None:
        embed, heads, rank = config.embed_dim, config.num_heads, mla.kv_lora_rank
        int8 = config.weights == "int8"
        q_in, q_axis = embed, "embed"
        if mla.q_lora_rank:
            q_in, q_axis = mla.q_lora_rank, "q_rank"
            axes: Axes = ("embed", q_axis)
            self.q_a = Linear("btd,dr->btr", (embed, q_in), dtype, axes, int8=int8)
            self.q_a_norm = RMSNorm((q_in,), dtype, (q_axis,), eps=mla.norm_eps)
        q_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        shape, axes = (q_in, heads, q_dim), (q_axis, "heads", "head_dim")
        self.q = Linear("btr,rnh->btnh", shape, dtype, axes, int8=int8)
        into_kv, axes = (embed, config.kv_width), ("embed", "kv_rank")
        self.kv_a = Linear("btd,dr->btr", into_kv, dtype, axes, int8=int8)
        self.kv_a_norm = RMSNorm((rank,), dtype, ("kv_rank",), eps=mla.norm_eps)
        up_axes = ("heads", "head_dim", "kv_rank")
        shape = (heads, mla.qk_nope_head_dim, rank)
        self.k_up = Linear("btnh,nhr->btnr", shape, dtype, up_axes, int8=int8)
        shape = (heads, mla.v_head_dim, rank)
        self.v_up = Linear("btnr,nvr->btnv", shape, dtype, up_axes, int8=int8)
        shape, axes = (heads, mla.v_head_dim, embed), ("heads", "head_dim", "embed")
        self.o = Linear("btnv,nvd->btd", shape, dtype, axes, int8=int8)
        if config.qkv_bias:
            self.kv_a_bias = param((config.kv_width,), dtype, ("kv_rank",))
            if mla.q_lora_rank:
                self.q_a_bias = param((q_in,), dtype, (q_axis,))
        if config.o_bias:
            self.o_bias = param((embed,), dtype, ("embed",))
        self.config, self.mla, self.layer = config, mla, layer
        self.backend = backend

    def __call__(
        self, x: jax.Array, tables: RopeTables | None, pages: jax.Array, place: Placement
    ) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] → the same shape, and the pages with this call's latents."""
        latents = self._latents(x, tables)
        pages = write_pages(pages, latents[:, :, None], place.page_ids, place.offsets)
        attended = paged_attention(
            self._queries(x, tables)[:, :, None],
            pages,
            place.page_table,
            place.positions,
            place.kv_lengths,
            scale=self.config.attention_scale,
            sliding_window=self.layer.sliding_window,
            softcap=self.config.attention_softcap,
            value_columns=(0, self.mla.kv_lora_rank),
            backend=self.backend,
        )[:, :, 0]
        out = self.o(self.v_up(attended))
        return (out + self.o_bias[...] if self.config.o_bias else out), pages

    def _latents(self, x: jax.Array, tables: RopeTables | None) -> jax.Array:
        """[B, T, rank + rope]: what is cached."""
        both = self.kv_a(x)
        if self.config.qkv_bias:
            both = both + self.kv_a_bias[...]
        latent, key = jnp.split(both, [self.mla.kv_lora_rank], axis=-1)
        key = apply_rope(key, tables, self.layer.rope)
        return jnp.concatenate([self.kv_a_norm(latent), key], axis=-1)

    def _queries(self, x: jax.Array, tables: RopeTables | None) -> jax.Array:
        """[B, T, N, rank + rope]: queries in the space of what is cached."""
        if self.mla.q_lora_rank:
            x = self.q_a(x)
            x = self.q_a_norm(x + self.q_a_bias[...] if self.config.qkv_bias else x)
        plain, turned = jnp.split(self.q(x), [self.mla.qk_nope_head_dim], axis=-1)
        return jnp.concatenate(
            [self.k_up(plain), apply_rope(turned, tables, self.layer.rope)], axis=-1
        )
