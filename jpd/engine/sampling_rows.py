"""Sampling settings as arrays by row, so that no request's settings need a compilation.

Numpy arrays on the host, JAX arrays inside jit. Knows what the settings are, not what they do: that
is sampling.py, penalties.py and logprobs.py. Made by the engines, one row for each sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jpd.request import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, SamplingParams

NUM_STOP_IDS = 2 * MAX_STOP_TOKEN_IDS
"""Width of a row's stop ids: the request's own and the model's."""

NO_TOKEN = -1
NO_LOGPROBS = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings of the rows of a call."""

    temperature: jax.Array  # float32 [B]; 0: greedy
    top_p: jax.Array  # float32 [B]; 1: off
    min_p: jax.Array  # float32 [B]; 0: off
    top_k: jax.Array  # int32 [B]; 0: off
    seed: jax.Array  # uint32 [B, 2]: high and low half
    stop_ids: jax.Array  # int32 [B, NUM_STOP_IDS], padded with NO_TOKEN
    min_position: jax.Array  # int32 [B]: no stop id is chosen for a position before this one
    repetition_penalty: jax.Array  # float32 [B]; 1: off
    presence_penalty: jax.Array  # float32 [B]; 0: off
    frequency_penalty: jax.Array  # float32 [B]; 0: off
    output_start: jax.Array  # int32 [B]: where the output begins in the history
    bias_ids: jax.Array  # int32 [B, MAX_LOGIT_BIASES], padded with NO_TOKEN
    biases: jax.Array  # float32 [B, MAX_LOGIT_BIASES]
    wants_logprobs: jax.Array  # bool [B]

    @property
    def has_penalties(self) -> jax.Array:
        """bool [B]: the row's choice depends on the history."""
        by_output = (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        return by_output | (self.repetition_penalty != 1)

    @property
    def has_bias(self) -> jax.Array:
        """bool [B]"""
        return self.bias_ids[:, 0] != NO_TOKEN

    def is_plain(self, positions: jax.Array) -> jax.Array:
        """bool [B]: the model's best token is the row's, without a look at anything else."""
        is_late = positions >= self.min_position
        return (self.temperature == 0) & is_late & ~self.has_penalties & ~self.has_bias

    def only(self, active: jax.Array) -> "SamplingRows":
        """Rows that are not active [B] as plain greedy ones, which ask for no work."""
        return replace(
            self,
            temperature=jnp.where(active, self.temperature, 0.0),
            min_position=jnp.where(active, self.min_position, 0),
            repetition_penalty=jnp.where(active, self.repetition_penalty, 1.0),
            presence_penalty=jnp.where(active, self.presence_penalty, 0.0),
            frequency_penalty=jnp.where(active, self.frequency_penalty, 0.0),
            bias_ids=jnp.where(active[:, None], self.bias_ids, NO_TOKEN),
            wants_logprobs=active & self.wants_logprobs,
        )


def greedy_rows(num_rows: int) -> SamplingRows:
    """Greedy rows without stop ids, on the host."""

    def filled(value: float, dtype: type, *width: int) -> jax.Array:
        return on_host(np.full((num_rows, *width), value, dtype))

    return SamplingRows(
        temperature=filled(0, np.float32),
        top_p=filled(1, np.float32),
        min_p=filled(0, np.float32),
        top_k=filled(0, np.int32),
        seed=filled(0, np.uint32, 2),
        stop_ids=filled(NO_TOKEN, np.int32, NUM_STOP_IDS),
        min_position=filled(0, np.int32),
        repetition_penalty=filled(1, np.float32),
        presence_penalty=filled(0, np.float32),
        frequency_penalty=filled(0, np.float32),
        output_start=filled(0, np.int32),
        bias_ids=filled(NO_TOKEN, np.int32, MAX_LOGIT_BIASES),
        biases=filled(0, np.float32, MAX_LOGIT_BIASES),
        wants_logprobs=filled(0, np.bool_),
    )


def sampling_row(
    sampling: SamplingParams,
    stop_token_ids: Sequence[int],
    first_position: int,
    num_output_tokens: int = 0,
) -> SamplingRows:
    """One request's row, on the host. Its next token stands at first_position.

    The last num_output_tokens before it are output too, of an attempt that was cut short.
    """
    if len(stop_token_ids) > NUM_STOP_IDS:
        raise ValueError(f"{len(stop_token_ids)} stop ids, a row has room for {NUM_STOP_IDS}")

    def one(value: Any, dtype: type) -> jax.Array:
        return on_host(np.array([value], dtype))

    bias_ids, biases = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
    seed = (sampling.seed or 0) % (1 << 64)
    return SamplingRows(
        temperature=one(sampling.temperature, np.float32),
        top_p=one(sampling.top_p, np.float32),
        min_p=one(sampling.min_p, np.float32),
        top_k=one(sampling.top_k, np.int32),
        seed=one([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        stop_ids=_padded(stop_token_ids, NUM_STOP_IDS, NO_TOKEN, np.int32),
        min_position=one(first_position + sampling.min_tokens, np.int32),
        repetition_penalty=one(sampling.repetition_penalty, np.float32),
        presence_penalty=one(sampling.presence_penalty, np.float32),
        frequency_penalty=one(sampling.frequency_penalty, np.float32),
        output_start=one(first_position - num_output_tokens, np.int32),
        bias_ids=_padded(bias_ids, MAX_LOGIT_BIASES, NO_TOKEN, np.int32),
        biases=_padded(biases, MAX_LOGIT_BIASES, 0, np.float32),
        wants_logprobs=one(sampling.logprobs is not None, np.bool_),
    )


def _padded(values: Sequence[float], width: int, padding: int, dtype: type) -> jax.Array:
    row: np.ndarray[Any, Any] = np.full((1, width), padding, dtype)
    row[0, : len(values)] = values
    return on_host(row)


def on_host(array: "np.ndarray[Any, Any]") -> jax.Array:
    """Jitted functions take numpy arrays as they are, without a compilation."""
    return cast(jax.Array, array)
