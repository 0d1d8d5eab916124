"""Which tokens the rows of a call may take, as one bit for each token of the vocabulary.

Made on the host for calls with guided rows; all other calls share arrays that are on the devices
already, so they upload nothing and, by a `lax.cond`, compute nothing. Called by the engines.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jpd.engine.sampling_rows import on_host
from jpd.guidance.guide import Mask, mask_width


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TokenMasks:
    """B rows, W = mask_width(V) words."""

    is_used: jax.Array  # bool []; False: every row may take any token
    paused: jax.Array  # bool [B]: takes no token in this call, and stays as it is
    allowed: jax.Array  # uint32 [B, W], the lowest bit of the first word for token 0


def open_masks(num_rows: int, vocab_size: int) -> TokenMasks:
    """Any token for every row, on the host."""
    return TokenMasks(
        is_used=on_host(np.array(False, np.bool_)),
        paused=on_host(np.zeros(num_rows, np.bool_)),
        allowed=on_host(np.full((num_rows, mask_width(vocab_size)), 0xFFFFFFFF, np.uint32)),
    )


def make_masks(
    num_rows: int, vocab_size: int, by_row: Mapping[int, Mask], paused_rows: Iterable[int] = ()
) -> TokenMasks:
    """These masks for these rows, any token for the others, on the host."""
    allowed = np.full((num_rows, mask_width(vocab_size)), 0xFFFFFFFF, np.uint32)
    for row, mask in by_row.items():
        allowed[row] = mask
    paused = np.zeros(num_rows, np.bool_)
    paused[list(paused_rows)] = True
    return TokenMasks(
        is_used=on_host(np.array(bool(by_row), np.bool_)),
        paused=on_host(paused),
        allowed=on_host(allowed),
    )


def masked(logits: jax.Array, masks: TokenMasks) -> jax.Array:
    """Logits [B, V], minus infinity where a row may not take the token."""

    def apply() -> jax.Array:
        ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)
        words = jnp.repeat(masks.allowed, 32, axis=1)[:, : logits.shape[1]]
        is_allowed = (words >> (ids % 32)[None]) & 1
        return jnp.where(is_allowed == 1, logits, -jnp.inf)

    result: jax.Array = jax.lax.cond(masks.is_used, apply, lambda: logits)
    return result
