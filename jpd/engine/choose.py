"""From logits to tokens: masks, sampling, log-probabilities, and what becomes of each row.

Compiled by number of rows alone, so that every width of page table and length of chunk shares it.
Pure functions without weights and pages, made executables by `jpd.engine.functions`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jpd.engine.decode_state import DecodeState, advance, first_rows, with_first_rows
from jpd.engine.logprobs import LogprobArrays, token_logprobs
from jpd.engine.prefill_chunk import ChunkEnds
from jpd.engine.results import StepResults, one_token_results, outcomes_of
from jpd.engine.sampling import sample
from jpd.engine.sampling_rows import SamplingRows
from jpd.engine.token_masks import TokenMasks, masked


def choose_first(ends: ChunkEnds, logits: jax.Array, masks: TokenMasks) -> StepResults:
    """A token for each row of a chunk that ends its prompt, of logits [R, V]."""
    rows = ends.sampling.only(ends.is_last)
    tokens, logprobs = _choose(logits, rows, ends.position, lambda: ends.history, masks)
    outcomes = outcomes_of(tokens, ends.position, ends.sampling, ends.last_position, ends.is_last)
    return one_token_results(tokens, outcomes, logprobs)


def choose_next(
    whole: DecodeState, logits: jax.Array, masks: TokenMasks
) -> tuple[DecodeState, StepResults]:
    """A token for every active slot of the first rows, of logits [R, V]. The others stay."""
    state, results = advance_rows(first_rows(whole, logits.shape[0]), logits, masks)
    return with_first_rows(whole, state), results


def advance_rows(
    state: DecodeState, logits: jax.Array, masks: TokenMasks
) -> tuple[DecodeState, StepResults]:
    """The same for a state of these rows only; its history may have more."""
    num_rows = logits.shape[0]
    takes_part = state.active & ~masks.paused
    tokens, logprobs = _choose(
        logits,
        state.sampling.only(takes_part),
        jnp.where(takes_part, state.positions, 0) + 1,
        lambda: state.history[:num_rows],
        masks,
    )
    return advance(state, tokens, logprobs, takes_part)


def _choose(
    logits: jax.Array,
    rows: SamplingRows,
    positions: jax.Array,
    read_history: Callable[[], jax.Array],
    masks: TokenMasks,
) -> tuple[jax.Array, LogprobArrays]:
    tokens = sample(masked(logits, masks), rows, positions, read_history)
    return tokens, token_logprobs(logits, tokens, rows.wants_logprobs)
