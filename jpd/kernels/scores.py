"""What every way of computing attention shares: its settings, the mask, the scores."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

MASKED_SCORE = -1e30
"""Finite: a query without any key gives an average instead of NaN, which would spread by page 0."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What is fixed when the function is compiled."""

    scale: float  # multiplies q·k
    sliding_window: int | None  # attends to this many latest positions, itself included; None: all
    softcap: float  # 0: none
    value_columns: tuple[int, int]  # [first, last) columns of a page that are values


def masked_scores(products: jax.Array, mask: jax.Array, settings: AttentionSettings) -> jax.Array:
    """q·k → float32 scores, where the mask (that broadcasts to them) is True."""
    scores = products * settings.scale
    if settings.softcap:
        scores = jnp.tanh(scores / settings.softcap) * settings.softcap
    return jnp.where(mask, scores, MASKED_SCORE)


def visible(
    query_positions: jax.Array,  # int32 [..., T]
    key_positions: jax.Array,  # int32 [..., S]
    kv_lengths: jax.Array,  # int32 [...]
    sliding_window: int | None,
) -> jax.Array:  # bool [..., T, S]
    """True where a key is written, not after the query, and inside its window.

    Window 3, query at 5: keys 0 1 2 | 3 4 5 | 6 7, of which the middle three are seen.
    """
    queries, keys = query_positions[..., :, None], key_positions[..., None, :]
    mask = (keys <= queries) & (keys < kv_lengths[..., None, None])
    if sliding_window is not None:
        mask &= keys > queries - sliding_window
    return mask
