"""What the parts of a step cost that its floor has not: attention over pages, choosing tokens.

Each part runs alone, for all layers, over the pool of the engines and at the step's shapes. What is
left over of a step (norms, rope, residuals, writing pages) is not measured apart. Called by the
engine's benchmark.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jpd.bench.engine_rig import EngineRig
from jpd.engine.sampling import best_tokens
from jpd.kernels.attention import paged_attention


class AttentionPart:
    """Attention of every layer, for rows of `num_queries` tokens after `context` cached ones."""

    def __init__(self, rig: EngineRig, num_rows: int, num_queries: int, context: int) -> None:
        config, page_size = rig.model.config, rig.cache.spec.page_size
        width = rig.buckets.context_width(context + num_queries)
        num_pages = -(-(context + num_queries) // page_size)
        owned = 1 + np.arange(num_rows * num_pages).reshape(num_rows, num_pages)
        table = np.zeros((num_rows, width), np.int32)
        table[:, :num_pages] = owned % rig.cache.spec.num_pages
        positions = np.tile(context + np.arange(num_queries), (num_rows, 1))
        heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        self._rig = rig
        self._operands = (
            jnp.ones((num_rows, num_queries, *heads), rig.cache.spec.dtype),
            jnp.asarray(table),
            jnp.asarray(positions, jnp.int32),
            jnp.full(num_rows, context + num_queries, jnp.int32),
        )
        self._run = jax.jit(self._attend)

    def __call__(self) -> jax.Array:
        out: jax.Array = self._run(self._rig.cache.layers, *self._operands)
        return out

    def _attend(
        self,
        layers: tuple[jax.Array, ...],
        queries: jax.Array,
        table: jax.Array,
        positions: jax.Array,
        kv_lengths: jax.Array,
    ) -> jax.Array:
        """One layer after another, as in the model: each has the result of the last as queries."""
        config = self._rig.model.config
        for pages, layer in zip(layers, config.layers, strict=True):
            queries = paged_attention(
                queries,
                pages,
                table,
                positions,
                kv_lengths,
                scale=config.attention_scale,
                sliding_window=layer.sliding_window,
                softcap=config.attention_softcap,
            )
        return queries


def choosing_part(rig: EngineRig, num_rows: int) -> "partial[jax.Array]":
    """The best tokens of greedy rows."""
    logits = jnp.zeros((num_rows, rig.model.config.vocab_size), jnp.float32)
    return partial(jax.jit(best_tokens), logits)
