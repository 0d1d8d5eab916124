"""Rotary position embedding: inverse frequencies of every kind, cos and sin tables, the rotation.

`rope_tables` is computed once per call for each distinct RopeConfig, not once per layer.
"""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jpd.nn.config import RopeConfig

Frequencies: TypeAlias = npt.NDArray[np.floating[Any]]
RopeTables = tuple[jax.Array, jax.Array]  # cos, sin: float32 [B, T, rotary_dim / 2]


def inverse_frequencies(rope: RopeConfig, head_dim: int, *, long: bool = False) -> Frequencies:
    """float32 [rotary_dim / 2]: the angle by which each pair of dims turns per position."""
    dim = rope.rotary_dim or head_dim
    plain: Frequencies = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    match rope.kind:
        case "linear":
            plain = plain / rope.factor
        case "llama3":
            plain = _llama3(plain, rope)
        case "yarn":
            plain = _yarn(plain, rope, dim)
        case "longrope":
            plain = plain / np.asarray(rope.long_factor if long else rope.short_factor)
        case "default" | "none":
            pass
    return plain.astype(np.float32)


def _llama3(plain: Frequencies, rope: RopeConfig) -> Frequencies:
    """Slow dims are stretched by `factor`, fast ones kept, a ramp between."""
    turns = rope.original_max_len * plain / (2 * math.pi)  # full turns within the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    mixed: Frequencies = (1 - smooth) * plain / rope.factor + smooth * plain
    return mixed


def _yarn(plain: Frequencies, rope: RopeConfig, dim: int) -> Frequencies:
    """Dims that turn over beta_fast times in the original context stay, under beta_slow stretch."""

    def dim_of_turns(turns: float) -> float:
        return (
            dim
            * math.log(rope.original_max_len / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dim_of_turns(rope.beta_fast), dim_of_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high  # no division by zero
    stretched = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    mixed: Frequencies = plain / rope.factor * stretched + plain * (1 - stretched)
    return mixed


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: jax.Array, lengths: jax.Array
) -> RopeTables | None:
    """cos and sin for int32 positions [B, T]; `lengths` [B] choose longrope's factors.

    One array behind a barrier: XLA's CPU compiler computes cos and sin anew for every head of every
    layer otherwise, and for two arrays in spite of it (JAX 0.10).
    """
    if rope.kind == "none":
        return None
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    if rope.kind == "longrope":
        is_long = (lengths > rope.original_max_len)[:, None, None]
        long = jnp.asarray(inverse_frequencies(rope, head_dim, long=True))
        frequencies = jnp.where(is_long, long, frequencies)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    tables = jnp.stack([jnp.cos(angles), jnp.sin(angles)]) * rope.attention_factor
    cos, sin = jax.lax.optimization_barrier(tables)
    return cos, sin


def apply_rope(x: jax.Array, tables: RopeTables | None, rope: RopeConfig) -> jax.Array:
    """Rotate the leading `rotary_dim` dims of x [B, T, ..., H].

    The halves (i, i + rotary_dim/2) form a pair, or neighbours (2i, 2i + 1) when `interleaved`. The
    result of the interleaved kind is left in the order of halves: queries and keys agree on it, and
    their product is the same.
    """
    if tables is None:
        return x
    rotary_dim = rope.rotary_dim or x.shape[-1]
    middle = (1,) * (x.ndim - 3)
    cos, sin = (table.reshape(*table.shape[:2], *middle, -1) for table in tables)
    turned = x[..., :rotary_dim].astype(jnp.float32)
    if rope.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-2)
    rotated = rotated.reshape(turned.shape)  # faster on CPU than to concatenate
    if rotary_dim == x.shape[-1]:
        return rotated.astype(x.dtype)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., rotary_dim:]], axis=-1)
