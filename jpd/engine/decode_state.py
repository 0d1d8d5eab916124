"""What the decode batch knows about itself, on device: one entry per slot.

The host only says who comes and who goes; last tokens, positions and who is still running stay on
the devices between steps. Pure functions, called inside jit by `jpd.engine.functions`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jpd.cache.page_allocator import BIN_PAGE
from jpd.engine.logprobs import LogprobArrays
from jpd.engine.results import Outcome, StepResults, one_token_results, outcomes_of
from jpd.engine.sampling_rows import SamplingRows, greedy_rows, on_host, sampling_row
from jpd.request import SamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class DecodeState:
    """Slots of the batch. B slots, W pages and H tokens of the longest sequence."""

    tokens: jax.Array  # int32 [B]: the latest token, not yet in the KV cache
    positions: jax.Array  # int32 [B]: where it stands = tokens in the KV cache
    active: jax.Array  # bool [B]
    last_position: jax.Array  # int32 [B]: where the last allowed token stands
    max_drafts: jax.Array  # int32 [B]: the most that are verified in a step; 0: no speculation
    page_table: jax.Array  # int32 [B, W]
    history: jax.Array  # int32 [B, H]: prompt and output, up to `tokens` at `positions`
    sampling: SamplingRows


def empty_state(num_slots: int, max_pages: int, page_size: int) -> DecodeState:
    """Idle slots, on the host."""
    return DecodeState(
        tokens=on_host(np.zeros(num_slots, np.int32)),
        positions=on_host(np.zeros(num_slots, np.int32)),
        active=on_host(np.zeros(num_slots, np.bool_)),
        last_position=on_host(np.zeros(num_slots, np.int32)),
        max_drafts=on_host(np.zeros(num_slots, np.int32)),
        page_table=on_host(np.full((num_slots, max_pages), BIN_PAGE, np.int32)),
        history=on_host(np.zeros((num_slots, max_pages * page_size), np.int32)),
        sampling=greedy_rows(num_slots),
    )


def one_row(
    *,
    token_ids: Sequence[int],
    num_output_tokens: int,
    page_ids: Sequence[int],
    max_pages: int,
    page_size: int,
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
    max_drafts: int = 0,
) -> DecodeState:
    """A state of one slot, on the host. The last of its tokens is not in the pages yet.

    max_tokens of its sampling counts from this token on, num_output_tokens those before it.
    """
    if sampling.max_tokens is None:
        raise ValueError("max_tokens is not resolved")
    page_table = np.full((1, max_pages), BIN_PAGE, np.int32)
    page_table[0, : len(page_ids)] = page_ids
    history = np.zeros((1, max_pages * page_size), np.int32)
    history[0, : len(token_ids)] = token_ids
    position = len(token_ids) - 1
    return DecodeState(
        tokens=on_host(np.array([token_ids[-1]], np.int32)),
        positions=on_host(np.array([position], np.int32)),
        active=on_host(np.ones(1, np.bool_)),
        last_position=on_host(np.array([position + sampling.max_tokens - 1], np.int32)),
        max_drafts=on_host(np.array([max_drafts], np.int32)),
        page_table=on_host(page_table),
        history=on_host(history),
        sampling=sampling_row(sampling, stop_token_ids, position, num_output_tokens),
    )


def insert_row(state: DecodeState, row: DecodeState, slot: jax.Array) -> DecodeState:
    """Put a one-slot state into a slot, whatever was there."""
    updated: DecodeState = jax.tree.map(lambda whole, one: whole.at[slot].set(one[0]), state, row)
    return updated


def add_pages(
    state: DecodeState, slots: jax.Array, columns: jax.Array, page_ids: jax.Array
) -> DecodeState:
    """Put pages into the tables of slots, all int32 [n]; a slot beyond the last one is padding."""
    page_table = state.page_table.at[slots, columns].set(page_ids, mode="drop")
    return dataclasses.replace(state, page_table=page_table)


def deactivate(state: DecodeState, slot: jax.Array) -> DecodeState:
    """End a slot's sequence: from now on it writes to the bin page only."""
    return dataclasses.replace(state, active=state.active.at[slot].set(False))


def first_rows(state: DecodeState, num_rows: int) -> DecodeState:
    """The state of these rows. The history stays whole, for its rows to be written in place."""
    part: DecodeState = jax.tree.map(lambda whole: whole[:num_rows], state)
    return dataclasses.replace(part, history=state.history)


def with_first_rows(state: DecodeState, part: DecodeState) -> DecodeState:
    """The state after its first rows have advanced; settings and page tables do not change."""
    num_rows = part.tokens.shape[0]
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[:num_rows].set(part.tokens),
        positions=state.positions.at[:num_rows].set(part.positions),
        active=state.active.at[:num_rows].set(part.active),
        history=part.history,
    )


def advance(
    state: DecodeState, tokens: jax.Array, logprobs: LogprobArrays, takes_part: jax.Array
) -> tuple[DecodeState, StepResults]:
    """Take a step's tokens [B], one for each active slot that took part; the others stay."""
    positions = state.positions + 1
    outcomes = outcomes_of(tokens, positions, state.sampling, state.last_position, takes_part)
    row_ids = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    columns = jnp.where(takes_part, positions, state.history.shape[1])  # out of range: dropped
    updated = dataclasses.replace(
        state,
        tokens=jnp.where(takes_part, tokens, state.tokens),
        positions=jnp.where(takes_part, positions, state.positions),
        active=jnp.where(takes_part, outcomes == Outcome.RUNNING.value, state.active),
        history=state.history.at[row_ids, columns].set(tokens, mode="drop"),
    )
    return updated, one_token_results(tokens, outcomes, logprobs)


def advance_several(
    state: DecodeState,
    tokens: jax.Array,
    num_tokens: jax.Array,
    logprobs: LogprobArrays,
    takes_part: jax.Array,
) -> tuple[DecodeState, StepResults]:
    """Take the first num_tokens [B] of tokens [B, M], in each slot that took part, as steps would
    one after another: up to the token that ends it. logprobs are [B, M]."""
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = state.positions[:, None] + 1 + steps
    is_taken = takes_part[:, None] & (steps < num_tokens[:, None])
    outcomes = jax.vmap(outcomes_of, in_axes=(1, 1, None, None, 1), out_axes=1)(
        tokens, positions, state.sampling, state.last_position, is_taken
    )
    is_end = (outcomes == Outcome.STOP.value) | (outcomes == Outcome.LENGTH.value)
    num_to_end = jnp.where(jnp.any(is_end, axis=1), jnp.argmax(is_end, axis=1) + 1, num_tokens)
    num_new = jnp.where(takes_part, num_to_end, 0).astype(jnp.int32)
    last = jnp.maximum(num_new - 1, 0)[:, None]
    outcome = jnp.take_along_axis(outcomes, last, axis=1)[:, 0]
    newest = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    row_ids = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    columns = jnp.where(steps < num_new[:, None], positions, state.history.shape[1])
    updated = dataclasses.replace(
        state,
        tokens=jnp.where(takes_part, newest, state.tokens),
        positions=state.positions + num_new,
        active=jnp.where(takes_part, outcome == Outcome.RUNNING.value, state.active),
        history=state.history.at[row_ids, columns].set(tokens, mode="drop"),
    )
    return updated, StepResults(tokens, num_new, outcome, logprobs)
