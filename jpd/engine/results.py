"""What a step says of each of its rows: the same struct for prefill chunks and decode steps.

Made inside jit by `jpd.engine.steps`, copied to the host while the next step runs, and read by the
engines. Knows no attempts.
"""

import dataclasses
import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jpd.engine.logprobs import LogprobArrays, read_logprobs
from jpd.engine.sampling_rows import SamplingRows, on_host
from jpd.request import FinishReason, TokenLogprobs


class Outcome(enum.IntEnum):
    """What a step did to a row, as a number in its results."""

    IDLE = 0  # nobody there, ended before, or its prompt goes on
    RUNNING = 1
    STOP = 2  # its last token is a stop id
    LENGTH = 3  # its last token is the last one allowed


FINISH_REASONS: dict[int, FinishReason] = {Outcome.STOP: "stop", Outcome.LENGTH: "length"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepResults:
    """Up to M tokens of each row: JAX arrays, or numpy arrays after `to_host`."""

    tokens: jax.Array  # int32 [rows, M]
    num_tokens: jax.Array  # int32 [rows]: how many of them are real, from the first on
    outcomes: jax.Array  # int32 [rows]: Outcome, after the last of them
    logprobs: LogprobArrays | None  # [rows, M]; None: not wanted on the host
    num_drafts: jax.Array | None = None  # int32 [rows]: verified; None: the step does not speculate

    def without_logprobs(self) -> "StepResults":
        """The rest, so that these are not copied."""
        return dataclasses.replace(self, logprobs=None)

    def copy_to_host_async(self) -> None:
        """Begin to copy; does not wait."""
        for array in jax.tree.leaves(self):
            array.copy_to_host_async()

    def to_host(self) -> "StepResults":
        """The same as numpy arrays. Waits for the step."""
        host: StepResults = jax.tree.map(lambda array: on_host(np.asarray(array)), self)
        return host

    def token_ids(self, row: int) -> tuple[int, ...]:
        """The real tokens of a row; of results on the host."""
        return tuple(self.tokens[row, : int(self.num_tokens[row])].tolist())

    def token_logprobs(self, row: int, num_top: int | None) -> tuple[TokenLogprobs, ...]:
        """Of each real token of a row, if num_top says that it asked; of results on the host."""
        if num_top is None:
            return ()
        assert self.logprobs is not None, "a row asked for logprobs, and they were not copied"
        of_row = jax.tree.map(lambda array: array[row], self.logprobs)
        return read_logprobs(of_row, slice(int(self.num_tokens[row])), num_top)


def one_token_results(
    tokens: jax.Array, outcomes: jax.Array, logprobs: LogprobArrays
) -> StepResults:
    """Results of a step with one token [B] for every row that is not idle."""
    num_tokens = (outcomes != Outcome.IDLE.value).astype(jnp.int32)
    with_places = jax.tree.map(lambda array: array[:, None], logprobs)
    return StepResults(tokens[:, None], num_tokens, outcomes, with_places)


def joined_results(steps: StepResults) -> StepResults:
    """Results of consecutive steps of one token, stacked [M, B, ...], as those of one call.

    A row is idle from the step on that follows its last one.
    """
    num_tokens = jnp.sum(steps.num_tokens, axis=0)
    last = jnp.maximum(num_tokens - 1, 0)[None]
    outcomes = jnp.take_along_axis(steps.outcomes, last, axis=0)[0]
    logprobs = jax.tree.map(lambda array: jnp.swapaxes(array[:, :, 0], 0, 1), steps.logprobs)
    return StepResults(jnp.transpose(steps.tokens[:, :, 0]), num_tokens, outcomes, logprobs)


def outcomes_of(
    tokens: jax.Array,
    positions: jax.Array,
    sampling: SamplingRows,
    last_position: jax.Array,
    active: jax.Array,
) -> jax.Array:
    """int32 [B]: what became of rows whose newest tokens [B] stand at `positions` [B]."""
    is_stop = jnp.any(tokens[:, None] == sampling.stop_ids, axis=-1)
    is_stop &= positions >= sampling.min_position
    is_last = positions >= last_position
    outcomes = jnp.where(is_last, Outcome.LENGTH.value, Outcome.RUNNING.value)
    outcomes = jnp.where(is_stop, Outcome.STOP.value, outcomes)
    return jnp.where(active, outcomes, Outcome.IDLE.value).astype(jnp.int32)
