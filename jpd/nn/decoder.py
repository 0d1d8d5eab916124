"""The decoder: embedding, layers, logits. One for all families; DecoderConfig holds what differs.

Called by `jpd.engine` inside jit, with raw arrays put in by `jpd.nn.params.rebuild`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpd.kernels.backends import AttentionBackend
from jpd.nn.attention import Attention, Placement
from jpd.nn.config import DecoderConfig, LayerConfig
from jpd.nn.layers import RMSNorm, softcap
from jpd.nn.linear import Embedding
from jpd.nn.mla import LatentAttention
from jpd.nn.mlp import MLP
from jpd.nn.moe import MoE
from jpd.nn.rope import RopeTables, rope_tables


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which pages the rows of a call own, and which of its tokens are real.

    The real tokens of a row stand first and their positions ascend by one. Padding is written to
    page 0.
    """

    page_table: jax.Array  # int32 [B, pages of a sequence]
    kv_lengths: jax.Array  # int32 [B]: tokens in the cache after this call
    valid: jax.Array  # bool [B, T]
    rope_lengths: jax.Array | None = None
    """int32 [B]: the most tokens the sequence may come to have, which choose longrope's factors
    for all of it: pages never hold keys of both kinds. None: `kv_lengths`."""


class Layer(nnx.Module):
    """One block: attention and feed-forward, each with its norms and residual."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        dtype: jnp.dtype,
        backend: AttentionBackend,
        *,
        is_split: bool,
    ) -> None:
        def norm() -> RMSNorm:
            shape, axes = (config.embed_dim,), ("embed",)
            return RMSNorm(shape, dtype, axes, eps=config.norm_eps, offset=config.norm_offset)

        self.attn = _attention(config, layer, dtype, backend)
        if layer.moe is None:
            self.mlp = MLP(
                config.embed_dim,
                config.mlp_dim,
                dtype,
                act=config.activation,
                bias=config.mlp_bias,
                int8=config.weights == "int8",
            )
        else:
            self.moe = MoE(config, layer.moe, dtype, is_split=is_split)
        self.is_dense, self.rope = layer.moe is None, layer.rope
        if config.norm_style != "post":
            self.attn_norm, self.mlp_norm = norm(), norm()
        if config.norm_style != "pre":
            self.post_attn_norm, self.post_mlp_norm = norm(), norm()
        self.config = config

    def __call__(
        self, x: jax.Array, tables: RopeTables | None, pages: jax.Array, place: Placement
    ) -> tuple[jax.Array, jax.Array]:
        pre, post = self.config.norm_style != "post", self.config.norm_style != "pre"
        out, pages = self.attn(self.attn_norm(x) if pre else x, tables, pages, place)
        x = x + (self.post_attn_norm(out) if post else out) * self.config.residual_scale
        feed_forward = self.mlp if self.is_dense else self.moe
        out = feed_forward(self.mlp_norm(x) if pre else x)
        return x + (self.post_mlp_norm(out) if post else out) * self.config.residual_scale, pages


def _attention(
    config: DecoderConfig, layer: LayerConfig, dtype: jnp.dtype, backend: AttentionBackend
) -> Attention | LatentAttention:
    if config.mla is None:
        return Attention(config, layer, dtype, backend)
    return LatentAttention(config, config.mla, layer, dtype, backend)


class Decoder(nnx.Module):
    """A decoder-only transformer over a paged KV cache; `is_split`: over several devices."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: jnp.dtype,
        backend: AttentionBackend,
        *,
        is_split: bool,
    ) -> None:
        table, int8 = (config.vocab_size, config.embed_dim), config.weights == "int8"
        self.embed = Embedding(*table, dtype, int8=int8)
        self.layers = nnx.List(
            [Layer(config, layer, dtype, backend, is_split=is_split) for layer in config.layers]
        )
        self.final_norm = RMSNorm(
            (config.embed_dim,), dtype, ("embed",), eps=config.norm_eps, offset=config.norm_offset
        )
        if not config.tied_embeddings:
            self.head = Embedding(*table, dtype, int8=int8)
        self.config = config

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, kv: tuple[jax.Array, ...], batch: PagedBatch
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """int32 tokens and positions [B, T] → hidden states [B, T, D] and the new pages."""
        return _run_layers(self.config, self.layers, self.embedded(tokens), positions, kv, batch)

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """int32 tokens [B, T] → what the first layer takes, [B, T, D]."""
        x = self.embed.rows(tokens)
        if self.config.embed_scale != 1.0:
            x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] → float32 logits [..., V]."""
        config = self.config
        head = self.embed if config.tied_embeddings else self.head
        logits = head(self.final_norm(hidden), jnp.dtype(jnp.float32))
        if config.logits_scale != 1.0:
            logits = logits * config.logits_scale
        return softcap(logits, config.logits_softcap)


class LayerGroup(nnx.Module):
    """Some layers of a decoder, for a call that computes only these."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[LayerConfig],
        dtype: jnp.dtype,
        backend: AttentionBackend,
        *,
        is_split: bool,
    ) -> None:
        self.layers = nnx.List(
            [Layer(config, layer, dtype, backend, is_split=is_split) for layer in layers]
        )
        self.config = config

    def __call__(
        self, x: jax.Array, positions: jax.Array, kv: tuple[jax.Array, ...], batch: PagedBatch
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Hidden states [B, T, D] → those after the last of these layers, and their new pages."""
        return _run_layers(self.config, self.layers, x, positions, kv, batch)


def _run_layers(
    config: DecoderConfig,
    layers: Sequence[Layer],
    x: jax.Array,
    positions: jax.Array,
    kv: tuple[jax.Array, ...],
    batch: PagedBatch,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    place = _place(positions, kv[0].shape[1], batch)
    lengths = batch.kv_lengths if batch.rope_lengths is None else batch.rope_lengths
    head_dim = config.head_dim if config.mla is None else config.mla.qk_rope_head_dim
    ropes = dict.fromkeys(layer.rope for layer in layers)
    tables = {rope: rope_tables(rope, head_dim, positions, lengths) for rope in ropes}
    new_kv = []
    for layer, pages in zip(layers, kv, strict=True):
        definition, params = nnx.split(layer)
        x, pages = _run_layer(definition, params, x, tables[layer.rope], pages, place)
        new_kv.append(pages)
    return x, tuple(new_kv)


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    definition: Any,
    params: Any,
    x: jax.Array,
    tables: RopeTables | None,
    pages: jax.Array,
    place: Placement,
) -> tuple[jax.Array, jax.Array]:
    """A layer, traced once for each kind of layer and shape instead of once per layer."""
    out: tuple[jax.Array, jax.Array] = nnx.merge(definition, params)(x, tables, pages, place)
    return out


def _place(positions: jax.Array, page_size: int, batch: PagedBatch) -> Placement:
    """Find the page and the offset of every token; padding goes to page 0."""
    columns = jnp.clip(positions // page_size, 0, batch.page_table.shape[1] - 1)
    page_ids = jnp.take_along_axis(batch.page_table, columns, axis=1)
    return Placement(
        positions=positions,
        page_table=batch.page_table,
        kv_lengths=batch.kv_lengths,
        page_ids=jnp.where(batch.valid, page_ids, 0),
        offsets=positions % page_size,
    )
