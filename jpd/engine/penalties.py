"""What is done to logits before anything is drawn from them: bias, penalties, no early end.

Each is skipped when no row asks for it. Penalties count tokens in the history inside the step, so
rows may come, go and be replayed without any count to keep. Called by sampling.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jpd.engine.sampling_rows import NO_TOKEN, SamplingRows

BARRED = -1e30
"""A logit that is taken only where all others are minus infinity."""

HISTORY_BLOCK = 512
"""Tokens that are counted at a time, so that the cost follows the rows and not their limit."""


def with_bias(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Each row's logit_bias added to its logits [B, V]."""

    def add() -> jax.Array:
        columns = jnp.where(rows.bias_ids == NO_TOKEN, logits.shape[1], rows.bias_ids)
        return logits.at[_row_ids(logits), columns].add(rows.biases, mode="drop")

    biased: jax.Array = jax.lax.cond(jnp.any(rows.has_bias), add, lambda: logits)
    return biased


def with_penalties(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    read_history: Callable[[], jax.Array],
) -> jax.Array:
    """Logits [B, V] lessened for tokens of the history, int32 [B, H], before `positions` [B].

    Repetition divides positive logits and multiplies negative ones, for every token that stands in
    the prompt or the output. Frequency is subtracted for each time that a token stands in the
    output, presence once.
    """

    def lessen() -> jax.Array:
        history = read_history()
        counts = _counts(history, rows.output_start, positions, logits)
        repeated_less: jax.Array = jax.lax.cond(
            jnp.any(rows.repetition_penalty != 1),
            lambda: _less_repeated(
                logits, rows, _counts(history, jnp.zeros_like(positions), positions, logits) > 0
            ),
            lambda: logits,
        )
        presence, frequency = rows.presence_penalty[:, None], rows.frequency_penalty[:, None]
        return repeated_less - frequency * counts - presence * jnp.minimum(counts, 1.0)

    penalised: jax.Array = jax.lax.cond(jnp.any(rows.has_penalties), lessen, lambda: logits)
    return penalised


def without_early_stops(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """Stop ids made the last choice in rows below their min_tokens; a mask still outweighs it."""
    is_early = (positions < rows.min_position)[:, None] & (rows.stop_ids != NO_TOKEN)
    columns = jnp.where(is_early, rows.stop_ids, logits.shape[1])  # out of range: dropped
    return logits.at[_row_ids(logits), columns].min(BARRED, mode="drop")


def _counts(history: jax.Array, starts: jax.Array, ends: jax.Array, logits: jax.Array) -> jax.Array:
    """How often each token stands in its row from `starts` to `ends` [B]: float32, as logits.

    Goes block by block as far as the longest row.
    """
    num_places, row_ids = history.shape[1], _row_ids(logits)
    block = min(HISTORY_BLOCK, num_places)

    def add(index: jax.Array, counts: jax.Array) -> jax.Array:
        first = jnp.minimum(index * block, num_places - block)  # the last may overlap
        places = first + jnp.arange(block, dtype=jnp.int32)[None]
        is_counted = (places >= jnp.maximum(starts[:, None], index * block)) & (
            places < ends[:, None]
        )
        tokens = jax.lax.dynamic_slice_in_dim(history, first, block, axis=1)
        columns = jnp.where(is_counted, tokens, logits.shape[1])  # out of range: dropped
        return counts.at[row_ids, columns].add(1.0, mode="drop")

    num_blocks = -(-jnp.minimum(jnp.max(ends), num_places) // block)
    counts: jax.Array = jax.lax.fori_loop(
        jnp.zeros_like(num_blocks), num_blocks, add, jnp.zeros(logits.shape, jnp.float32)
    )
    return counts


def _less_repeated(logits: jax.Array, rows: SamplingRows, is_repeated: jax.Array) -> jax.Array:
    penalty = rows.repetition_penalty[:, None]
    lessened = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(is_repeated, lessened, logits)


def _row_ids(logits: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
