"""KV pages as int8 on the wire: a scale per token, head and part (keys and values apart).

Runs inside the jitted gather of the source and the jitted scatter of the destination. The pools
themselves keep their dtype.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

LEVELS = 127
SCALE_BYTES = 4


def token_head_bytes(parts: Sequence[int]) -> int:
    """What one token of one head takes on the wire."""
    return sum(parts) + SCALE_BYTES * len(parts)


def quantise(pages: jax.Array, parts: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Pages [n, p, K, W] → int8 of that shape and float32 scales [n, p, K, parts].

    The error of a number is at most half a scale: 1/254 of the largest of its token, head and part.
    """
    values = pages.astype(jnp.float32)
    found = [
        jnp.max(jnp.abs(part), axis=-1, keepdims=True) / LEVELS for part in _split(values, parts)
    ]
    scales = jnp.concatenate(found, axis=-1)
    divisors = _spread(jnp.where(scales > 0.0, scales, 1.0), parts)
    return jnp.round(values / divisors).astype(jnp.int8), scales


def dequantise(levels: jax.Array, scales: jax.Array, parts: Sequence[int]) -> jax.Array:
    """float32 pages."""
    return levels.astype(jnp.float32) * _spread(scales, parts)


def _split(values: jax.Array, parts: Sequence[int]) -> list[jax.Array]:
    return jnp.split(values, np.cumsum(parts)[:-1].tolist(), axis=-1)


def _spread(scales: jax.Array, parts: Sequence[int]) -> jax.Array:
    """[n, p, K, parts] → [n, p, K, W]: each scale as often as it has numbers."""
    shape = scales.shape[:-1]
    spread = [
        jnp.broadcast_to(scales[..., index : index + 1], (*shape, width))
        for index, width in enumerate(parts)
    ]
    return jnp.concatenate(spread, axis=-1)
