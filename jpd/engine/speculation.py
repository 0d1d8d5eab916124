"""Speculative decoding by prompt lookup: what came after the last tokens before may come again.

Exact: at every position a token is sampled from the model as without speculation, with the same key
of (seed, position), and a draft is kept only while it equals that token. (For the distribution: a
proposal that is certain of its token x is accepted with probability p(x), and what is sampled
otherwise is x' ~ p given x' != x; that is rejection sampling.) Tokens differ from those of plain
steps only where rounding decides between two, for more positions are computed in one product.
Called inside jit by steps.py. Knows no pages and no model.
"""

import jax
import jax.numpy as jnp

NOTHING = -1


def prompt_lookup(
    history: jax.Array, positions: jax.Array, limits: jax.Array, num_drafts: int
) -> tuple[jax.Array, jax.Array]:
    """Drafts int32 [B, num_drafts] after the token at `positions` [B], and how many there are [B].

    They are what followed the latest earlier place in the history [B, H] where the last three
    tokens stand, or else the last two; a run that reaches the end is taken to repeat. `limits` [B]
    is the most that a row may have.
    """
    places = _latest_match(history, positions)
    is_found = places != NOTHING
    period = jnp.where(is_found, positions - places, 1)
    steps = jnp.arange(num_drafts, dtype=jnp.int32)[None]
    sources = places[:, None] + 1 + steps % period[:, None]
    drafts = jnp.take_along_axis(history, jnp.maximum(sources, 0), axis=1)
    return drafts, jnp.where(is_found, jnp.clip(limits, 0, num_drafts), 0)


def _latest_match(history: jax.Array, positions: jax.Array) -> jax.Array:
    """Where the latest earlier run of the same last tokens ends, int32 [B], or NOTHING."""
    ids = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
    ends = positions[:, None]

    def same(distance: int) -> jax.Array:
        """bool [B, H]: the token `distance` before a place equals that before the position."""
        wanted = jnp.take_along_axis(history, jnp.maximum(ends - distance, 0), axis=1)
        shifted = jnp.pad(history, ((0, 0), (distance, 0)))[:, : history.shape[1]]
        return (shifted == wanted) & (ids >= distance)

    by_two = same(0) & same(1) & (ids < ends)
    by_three = by_two & same(2)
    latest_two, latest_three = (
        jnp.max(jnp.where(found, ids, NOTHING), axis=1) for found in (by_two, by_three)
    )
    return jnp.where(latest_three != NOTHING, latest_three, latest_two)


def num_accepted(tokens: jax.Array, drafts: jax.Array, num_drafts: jax.Array) -> jax.Array:
    """int32 [B]: how many drafts [B, K] equal the tokens [B, 1 + K] sampled in their places."""
    steps = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None]
    is_right = (tokens[:, :-1] == drafts) & (steps < num_drafts[:, None])
    return jnp.sum(jnp.cumprod(is_right.astype(jnp.int32), axis=1), axis=1)
