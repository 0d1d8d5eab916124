"""A softmax over blocks of keys, one block after another, in float32.

Knows no pages: a caller brings scores, and says how weights and values are multiplied. Shared by
the attentions that work in blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jpd.kernels.scores import MASKED_SCORE


class Softmax(NamedTuple):
    """A softmax under way: highest score, sum of exp(score - highest), and values so weighted."""

    highest: jax.Array  # float32 [..., K, G, T]
    total: jax.Array  # float32 [..., K, G, T]
    values: jax.Array  # float32 [..., K, G, T, value width]


def empty(shape: tuple[int, ...], value_width: int) -> Softmax:
    """Before the first block; `shape` is [..., K, G, T]."""
    return Softmax(
        jnp.full(shape, MASKED_SCORE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, value_width), jnp.float32),
    )


def add_block(
    state: Softmax, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]
) -> Softmax:
    """Take in scores float32 [..., K, G, T, S]; `weigh` gives weights · values, float32."""
    highest = jnp.maximum(state.highest, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - highest[..., None])
    shrink = jnp.exp(state.highest - highest)
    return Softmax(
        highest,
        state.total * shrink + jnp.sum(weights, axis=-1),
        state.values * shrink[..., None] + weigh(weights),
    )


def finish(state: Softmax, sinks: jax.Array | None) -> jax.Array:
    """Divide by the sum; a sink [K, G] takes part in it but carries no value."""
    if sinks is None:
        total = jnp.maximum(state.total, 1e-30)  # 0 where no block was read
        return state.values / total[..., None]
    sink_scores = sinks.astype(jnp.float32)[..., None]
    highest = jnp.maximum(state.highest, sink_scores)
    shrink = jnp.exp(state.highest - highest)
    total = state.total * shrink + jnp.exp(sink_scores - highest)
    return state.values * (shrink / total)[..., None]
