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


_PLAIN_FLOATS = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
_PLAIN_INTS = (0, 0, 0, 0)
"""The settings of a greedy row that asks for nothing, in the order of SamplingRows."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling settings of the rows of a call.

    Few arrays, because each costs the host microseconds in every call.
    """

    floats: jax.Array  # float32 [B, 6]
    ints: jax.Array  # int32 [B, 4]
    seed: jax.Array  # uint32 [B, 2]: high and low half
    stop_ids: jax.Array  # int32 [B, NUM_STOP_IDS], padded with NO_TOKEN
    bias_ids: jax.Array  # int32 [B, MAX_LOGIT_BIASES], padded with NO_TOKEN
    biases: jax.Array  # float32 [B, MAX_LOGIT_BIASES]

    @property
    def temperature(self) -> jax.Array:
        """float32 [B]; 0: greedy"""
        return self.floats[:, 0]

    @property
    def top_p(self) -> jax.Array:
        """float32 [B]; 1: off"""
        return self.floats[:, 1]

    @property
    def min_p(self) -> jax.Array:
        """float32 [B]; 0: off"""
        return self.floats[:, 2]

    @property
    def repetition_penalty(self) -> jax.Array:
        """float32 [B]; 1: off"""
        return self.floats[:, 3]

    @property
    def presence_penalty(self) -> jax.Array:
        """float32 [B]; 0: off"""
        return self.floats[:, 4]

    @property
    def frequency_penalty(self) -> jax.Array:
        """float32 [B]; 0: off"""
        return self.floats[:, 5]

    @property
    def top_k(self) -> jax.Array:
        """int32 [B]; 0: off"""
        return self.ints[:, 0]

    @property
    def min_position(self) -> jax.Array:
        """int32 [B]: no stop id is chosen for a position before this one."""
        return self.ints[:, 1]

    @property
    def output_start(self) -> jax.Array:
        """int32 [B]: where the output begins in the history."""
        return self.ints[:, 2]

    @property
    def wants_logprobs(self) -> jax.Array:
        """bool [B]"""
        return self.ints[:, 3] != 0

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
        is_active = active[:, None]
        return replace(
            self,
            floats=jnp.where(is_active, self.floats, jnp.array(_PLAIN_FLOATS, jnp.float32)[None]),
            ints=jnp.where(is_active, self.ints, jnp.array(_PLAIN_INTS, jnp.int32)[None]),
            bias_ids=jnp.where(is_active, self.bias_ids, NO_TOKEN),
        )


def greedy_rows(num_rows: int) -> SamplingRows:
    """Greedy rows without stop ids, on the host."""

    def filled(value: float, dtype: type, width: int) -> jax.Array:
        return on_host(np.full((num_rows, width), value, dtype))

    return SamplingRows(
        floats=on_host(np.tile(np.array(_PLAIN_FLOATS, np.float32), (num_rows, 1))),
        ints=on_host(np.tile(np.array(_PLAIN_INTS, np.int32), (num_rows, 1))),
        seed=filled(0, np.uint32, 2),
        stop_ids=filled(NO_TOKEN, np.int32, NUM_STOP_IDS),
        bias_ids=filled(NO_TOKEN, np.int32, MAX_LOGIT_BIASES),
        biases=filled(0, np.float32, MAX_LOGIT_BIASES),
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
    bias_ids, biases = zip(*sampling.logit_bias, strict=True) if sampling.logit_bias else ((), ())
    seed = (sampling.seed or 0) % (1 << 64)
    floats = (
        *(sampling.temperature, sampling.top_p, sampling.min_p),
        *(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty),
    )
    ints = (
        *(sampling.top_k, first_position + sampling.min_tokens),
        *(first_position - num_output_tokens, sampling.logprobs is not None),
    )
    return SamplingRows(
        floats=on_host(np.array([floats], np.float32)),
        ints=on_host(np.array([ints], np.int32)),
        seed=on_host(np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)),
        stop_ids=_padded(stop_token_ids, NUM_STOP_IDS, NO_TOKEN, np.int32),
        bias_ids=_padded(bias_ids, MAX_LOGIT_BIASES, NO_TOKEN, np.int32),
        biases=_padded(biases, MAX_LOGIT_BIASES, 0, np.float32),
    )


def _padded(values: Sequence[float], width: int, padding: int, dtype: type) -> jax.Array:
    row: np.ndarray[Any, Any] = np.full((1, width), padding, dtype)
    row[0, : len(values)] = values
    return on_host(row)


def on_host(array: "np.ndarray[Any, Any]") -> jax.Array:
    """Jitted functions take numpy arrays as they are, without a compilation."""
    return cast(jax.Array, array)
