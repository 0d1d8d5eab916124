"""Choosing tokens inside the jitted step; every setting is an array by row, so nothing recompiles.

1. A batch of plain greedy rows takes the best tokens and does nothing else.
2. Else logits get what penalties.py adds: bias, penalties, no stop id before min_tokens.
3. Each row's filters become one threshold on its weights exp((logit - max) / temperature).
4. The token is drawn, by one uniform number, from the weights at or above the threshold.
Called by the engines' step functions. Knows no model and no pages.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jpd.engine.penalties import with_bias, with_penalties, without_early_stops
from jpd.engine.sampling_rows import SamplingRows

NUM_CANDIDATES = 256
"""Thresholds are sought among so many best tokens; where these are too few, by bisection."""

ONE_BITS = 0x3F800000
"""1.0 as bits. Floats from 0 up are ordered as their bits are."""


def sample(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    read_history: Callable[[], jax.Array],
) -> jax.Array:
    """float32 logits [B, V] → int32 tokens [B], which will stand at `positions` [B].

    read_history gives the tokens before them, int32 [B, H]; it is called where only a call with
    penalties gets to, so that others copy nothing.
    """
    tokens: jax.Array = jax.lax.cond(
        jnp.all(rows.is_plain(positions)),
        lambda: best_tokens(logits),
        lambda: _sample_rows(logits, rows, positions, read_history),
    )
    return tokens


def best_tokens(logits: jax.Array) -> jax.Array:
    """The arg max of each row [B, V], of equals the lowest id.

    In two levels: on CPU one pass over the maxima of blocks is many times as fast as argmax.
    """
    block = _block_size(logits.shape[1])
    blocks = logits.reshape(logits.shape[0], -1, block)
    chosen = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, chosen[:, None, None], axis=1)[:, 0]
    return chosen * block + jnp.argmax(inside, axis=-1).astype(jnp.int32)


def _sample_rows(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    read_history: Callable[[], jax.Array],
) -> jax.Array:
    logits = with_bias(logits, rows)
    logits = with_penalties(logits, rows, positions, read_history)
    logits = without_early_stops(logits, rows, positions)
    greedy = best_tokens(logits)

    def draw() -> jax.Array:
        is_greedy = rows.temperature == 0
        temperature = jnp.where(is_greedy, 1.0, rows.temperature)[:, None]
        weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
        drawn = _draw(weights, _thresholds(weights, rows), _uniforms(rows.seed, positions))
        return jnp.where(is_greedy, greedy, drawn)

    tokens: jax.Array = jax.lax.cond(jnp.any(rows.temperature > 0), draw, lambda: greedy)
    return tokens


def _uniforms(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """One number in [0, 1) by row, from its seed and position alone."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (), jnp.float32)

    return jax.vmap(one)(seeds, positions)


def _thresholds(weights: jax.Array, rows: SamplingRows) -> jax.Array:
    """The least weight that passes each row's filters; the best token's weight is 1."""
    is_filtered = (rows.top_k > 0) | (rows.top_p < 1)
    by_rank_or_mass = jax.lax.cond(
        jnp.any(is_filtered & (rows.temperature > 0)),
        lambda: _filter_thresholds(weights, rows),
        lambda: jnp.zeros_like(rows.temperature),
    )
    return jnp.maximum(by_rank_or_mass, rows.min_p)


def _filter_thresholds(weights: jax.Array, rows: SamplingRows) -> jax.Array:
    """top_k, then top_p of the mass that is left. Ties at the threshold all pass."""
    num_candidates = min(NUM_CANDIDATES, weights.shape[-1])
    found, is_exact = _candidate_thresholds(weights, rows, num_candidates)
    if num_candidates == weights.shape[-1]:
        return found
    needs_all = (rows.temperature > 0) & ~is_exact
    thresholds: jax.Array = jax.lax.cond(
        jnp.any(needs_all), lambda: _bisected_thresholds(weights, rows), lambda: found
    )
    return thresholds


def _candidate_thresholds(
    weights: jax.Array, rows: SamplingRows, num_candidates: int
) -> tuple[jax.Array, jax.Array]:
    """Thresholds found among the best tokens, and in which rows these were enough."""
    # Without the barrier XLA merges slices into it, knows top_k no more and sorts the vocabulary.
    best = jax.lax.optimization_barrier(jax.lax.top_k(weights, num_candidates)[0])  # descending
    ranks = jnp.clip(rows.top_k, 1, num_candidates) - 1
    has_top_k, has_top_p = rows.top_k > 0, rows.top_p < 1
    by_rank = jnp.where(has_top_k, jnp.take_along_axis(best, ranks[:, None], axis=1)[:, 0], 0.0)
    left = jnp.where(best >= by_rank[:, None], best, 0.0)
    mass = jnp.where(has_top_k, jnp.sum(left, axis=-1), jnp.sum(weights, axis=-1))
    is_reached = jnp.cumsum(left, axis=-1) >= (rows.top_p * mass)[:, None]
    first = jnp.argmax(is_reached, axis=-1)
    by_mass = jnp.where(has_top_p, jnp.take_along_axis(best, first[:, None], axis=1)[:, 0], 0.0)
    # Beyond the last candidate there may be equals of it, which matters unless they weigh nothing:
    has_all_equals = (rows.top_k < num_candidates) & (by_rank > best[:, -1])
    rank_is_exact = ~has_top_k | has_all_equals | (best[:, -1] == 0)
    mass_is_exact = ~has_top_p | has_top_k | jnp.any(is_reached, axis=-1)
    return jnp.maximum(by_rank, by_mass), rank_is_exact & mass_is_exact


def _bisected_thresholds(weights: jax.Array, rows: SamplingRows) -> jax.Array:
    top_k = jnp.clip(rows.top_k, 0, weights.shape[-1])
    nothing = jnp.zeros_like(rows.top_p)

    def has_rank(threshold: jax.Array) -> jax.Array:
        passing = (weights >= threshold[:, None]).astype(jnp.int32)
        return jnp.sum(passing, axis=-1) >= top_k

    found = jax.lax.cond(
        jnp.any(top_k > 0), lambda: _largest_threshold(has_rank, nothing), lambda: nothing
    )
    by_rank = jnp.where(top_k > 0, found, 0.0)
    left = jnp.where(weights >= by_rank[:, None], weights, 0.0)
    wanted = rows.top_p * jnp.sum(left, axis=-1)

    def has_mass(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(left >= threshold[:, None], left, 0.0), axis=-1) >= wanted

    found = jax.lax.cond(
        jnp.any(rows.top_p < 1), lambda: _largest_threshold(has_mass, nothing), lambda: nothing
    )
    return jnp.maximum(by_rank, jnp.where(rows.top_p < 1, found, 0.0))


def _largest_threshold(holds: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """The largest float in [0, 1] for which `holds`, by row. It holds at 0 and up to some value."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds at low, not at high
        middle = low + (high - low) // 2
        is_held = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(is_held, middle, low), jnp.where(is_held, high, middle)

    low = jnp.zeros(like.shape, jnp.int32)
    low, _ = jax.lax.fori_loop(0, ONE_BITS.bit_length(), halve, (low, low + (ONE_BITS + 1)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _draw(weights: jax.Array, thresholds: jax.Array, uniforms: jax.Array) -> jax.Array:
    """One index by row among the weights from its threshold up, each as likely as it weighs.

    The sum of weights is inverted in two levels, blocks and then places in the block, so that no
    running sum is taken over the vocabulary.
    """
    least = thresholds[:, None, None]
    num_rows, num_tokens = weights.shape
    block = _block_size(num_tokens)
    blocks = weights.reshape(num_rows, num_tokens // block, block)
    sums = jnp.sum(jnp.where(blocks >= least, blocks, 0.0), axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    targets = uniforms * ends[:, -1]
    chosen = _first_beyond(ends, sums, targets)
    starts = jnp.take_along_axis(ends - sums, chosen[:, None], axis=1)[:, 0]
    inside = jnp.take_along_axis(blocks, chosen[:, None, None], axis=1)
    inside = jnp.where(inside >= least, inside, 0.0)[:, 0]
    place = _first_beyond(jnp.cumsum(inside, axis=-1), inside, targets - starts)
    return chosen * block + place


def _first_beyond(ends: jax.Array, weights: jax.Array, targets: jax.Array) -> jax.Array:
    """The first place with weight that ends beyond the target, else the last place with weight.

    Rounding may put an end out of order, so a place without weight is never taken.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, ends.shape, 1)
    has_weight = weights > 0
    first = jnp.min(jnp.where((ends > targets[:, None]) & has_weight, ids, ends.shape[1]), axis=-1)
    last = jnp.max(jnp.where(has_weight, ids, 0), axis=-1)
    return jnp.minimum(first, last)


def _block_size(num_tokens: int) -> int:
    """A divisor near the square root that leaves blocks to share among up to 8 devices."""
    per_part = num_tokens // math.gcd(num_tokens, 8)
    limit = math.isqrt(num_tokens)
    return next(size for size in range(limit, 0, -1) if per_part % size == 0)
