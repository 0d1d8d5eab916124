"""Only the experts that tokens chose: tokens sorted by expert, a few of one expert at a time.

Exact and without a limit on the tokens of an expert; how many turns it takes is known only when it
runs. All weights of an expert must be on the device. Called by `jpd.nn.moe`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

FEW_CHOICES = 256
FEW_ROWS, MANY_ROWS = 8, 32
"""Tokens of a turn, up to FEW_CHOICES choices and beyond. Measured on CPU with 64 experts."""

Expert = Callable[[jax.Array, jax.Array], jax.Array]


def run_chosen(
    x: jax.Array, experts: jax.Array, weights: jax.Array, num_experts: int, run: Expert
) -> jax.Array:
    """Sum of the chosen experts' outputs. x [N, D], int32 experts and weights [N, k] → [N, D].

    `run` (rows [R, D], int32 expert) → [R, D]: what one expert makes of some tokens.
    """
    num_choices = experts.size
    num_rows = FEW_ROWS if num_choices <= FEW_CHOICES else MANY_ROWS
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # choices by expert
    bounds = jnp.searchsorted(flat[order], jnp.arange(num_experts + 1, dtype=flat.dtype))
    turns = -(-jnp.diff(bounds) // num_rows)  # of each expert
    ends = jnp.cumsum(turns)

    def turn(number: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(ends, number, side="right")
        first = bounds[expert] + (number - ends[expert] + turns[expert]) * num_rows
        places = first + jnp.arange(num_rows, dtype=first.dtype)
        choices = order[jnp.minimum(places, num_choices - 1)]
        tokens = choices // experts.shape[1]
        share = jnp.where(places < bounds[expert + 1], weights.reshape(-1)[choices], 0)
        part = run(x[tokens], expert) * share[:, None]
        return out.at[tokens].add(part.astype(out.dtype))

    out: jax.Array = jax.lax.fori_loop(0, ends[-1], turn, jnp.zeros(x.shape, jnp.float32))
    return out.astype(x.dtype)
