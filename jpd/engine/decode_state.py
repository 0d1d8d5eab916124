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
from jpd.engine.results import Outcome, StepResults, one_token_results, outcomes_of
from jpd.engine.sampling import SamplingRows, greedy_rows, on_host, sampling_row
from jpd.request import SamplingParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class DecodeState:
    """Slots of the batch. B slots, W pages of the longest sequence."""

    tokens: jax.Array  # int32 [B]: the latest token, not yet in the KV cache
    positions: jax.Array  # int32 [B]: where it stands = tokens in the KV cache
    active: jax.Array  # bool [B]
    last_position: jax.Array  # int32 [B]: where the last allowed token stands
    page_table: jax.Array  # int32 [B, W]
    sampling: SamplingRows


def empty_state(num_slots: int, max_pages: int) -> DecodeState:
    """Idle slots, on the host."""
    return DecodeState(
        tokens=on_host(np.zeros(num_slots, np.int32)),
        positions=on_host(np.zeros(num_slots, np.int32)),
        active=on_host(np.zeros(num_slots, np.bool_)),
        last_position=on_host(np.zeros(num_slots, np.int32)),
        page_table=on_host(np.full((num_slots, max_pages), BIN_PAGE, np.int32)),
        sampling=greedy_rows(num_slots),
    )


def one_row(
    *,
    token_id: int,
    position: int,
    page_ids: Sequence[int],
    max_pages: int,
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
) -> DecodeState:
    """A state of one slot, on the host, whose first output token stands at `position`."""
    if sampling.max_tokens is None:
        raise ValueError("max_tokens is not resolved")
    page_table = np.full((1, max_pages), BIN_PAGE, np.int32)
    page_table[0, : len(page_ids)] = page_ids
    return DecodeState(
        tokens=on_host(np.array([token_id], np.int32)),
        positions=on_host(np.array([position], np.int32)),
        active=on_host(np.ones(1, np.bool_)),
        last_position=on_host(np.array([position + sampling.max_tokens - 1], np.int32)),
        page_table=on_host(page_table),
        sampling=sampling_row(sampling, stop_token_ids, position),
    )


def insert_row(state: DecodeState, row: DecodeState, slot: jax.Array) -> DecodeState:
    """Put a one-slot state into a slot, whatever was there."""
    updated: DecodeState = jax.tree.map(lambda whole, one: whole.at[slot].set(one[0]), state, row)
    return updated


def deactivate(state: DecodeState, slot: jax.Array) -> DecodeState:
    """End a slot's sequence: from now on it writes to the bin page only."""
    return dataclasses.replace(state, active=state.active.at[slot].set(False))


def first_rows(state: DecodeState, num_rows: int) -> DecodeState:
    part: DecodeState = jax.tree.map(lambda whole: whole[:num_rows], state)
    return part


def with_first_rows(state: DecodeState, part: DecodeState) -> DecodeState:
    """The state after its first rows have advanced; settings and page tables do not change."""
    num_rows = part.tokens.shape[0]
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[:num_rows].set(part.tokens),
        positions=state.positions.at[:num_rows].set(part.positions),
        active=state.active.at[:num_rows].set(part.active),
    )


def advance(
    state: DecodeState, tokens: jax.Array, takes_part: jax.Array
) -> tuple[DecodeState, StepResults]:
    """Take a step's tokens [B], one for each active slot that took part; the others stay."""
    positions = state.positions + 1
    outcomes = outcomes_of(tokens, positions, state.sampling, state.last_position, takes_part)
    updated = dataclasses.replace(
        state,
        tokens=jnp.where(takes_part, tokens, state.tokens),
        positions=jnp.where(takes_part, positions, state.positions),
        active=jnp.where(takes_part, outcomes == Outcome.RUNNING.value, state.active),
    )
    return updated, one_token_results(tokens, outcomes)
