"""What must be computed and moved at least for a step, against what this machine reaches.

The ceilings are measured in the same run (`jpd.bench.ceilings`). MFU is the share of arithmetic
that a measured point reaches, MBU of memory. Dense models only: of experts it is not known how many
a step reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jpd.bench.ceilings import Ceilings
from jpd.bench.floor import HEADS
from jpd.bench.latency import Outcome, percentile, tpots
from jpd.bench.results import Result
from jpd.nn.config import DecoderConfig
from jpd.nn.params import abstract_params


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a computation has to do."""

    flops: float
    num_bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)

    def times(self, count: float) -> "Work":
        return Work(self.flops * count, self.num_bytes * count)


class ModelWork:
    """The work of steps of one model, all of its numbers of `dtype`."""

    def __init__(self, config: DecoderConfig, dtype: str = "float32") -> None:
        self._config, self._itemsize = config, jnp.dtype(dtype).itemsize
        shapes = {spec.path: spec.shape for spec in abstract_params(config, np.dtype(dtype)).specs}
        head = next(path for path in HEADS if path in shapes)
        self._head = math.prod(shapes[head])
        self._body = sum(
            math.prod(shape)
            for path, shape in shapes.items()
            if len(shape) > 1 and path not in HEADS
        )

    @property
    def weight_bytes(self) -> float:
        """Read by every step that gives logits; of embeddings a few rows only are looked up."""
        return float(self._body + self._head) * self._itemsize

    def prefill(self, num_tokens: int, chunk: int | None = None) -> Work:
        """A prompt to its first token: weights once for each chunk, KV of a chunk's past."""
        chunk = chunk or num_tokens
        starts = range(0, num_tokens, chunk)
        flops = 2.0 * (self._body * num_tokens + self._head)
        flops += attention_flops(self._config, num_tokens)
        weights = (self._body * len(starts) + self._head) * self._itemsize
        cached = sum(self._kv_bytes(min(start + chunk, num_tokens)) for start in starts)
        return Work(flops, weights + cached)

    def decode(self, batch: int, context: float) -> Work:
        """One token for each of `batch` rows that hold `context` tokens."""
        flops = 2.0 * (self._body + self._head) * batch
        seen = self._num_seen(context)
        flops += 4.0 * self._config.num_heads * self._config.head_dim * seen * batch
        return Work(flops, self.weight_bytes + self._kv_bytes(context) * batch)

    def _kv_bytes(self, context: float) -> float:
        width = self._config.num_cached_heads * self._config.kv_width
        return self._num_seen(context) * width * self._itemsize

    def _num_seen(self, context: float) -> float:
        """Cached tokens that one query sees, summed over the layers."""
        windows = (layer.sliding_window for layer in self._config.layers)
        return float(sum(min(context, window or context) for window in windows))


def attention_flops(config: DecoderConfig, num_tokens: int) -> float:
    """q·k and weights·v of a whole prompt: 4 x heads x head_dim for each pair of a query and a key
    that it sees, t + 1 keys of the query at t, at most the layer's window."""
    positions = np.arange(1, num_tokens + 1)
    pairs = 0
    for layer in config.layers:
        window = layer.sliding_window or num_tokens
        pairs += int(np.minimum(positions, window).sum())
    return 4.0 * config.num_heads * config.head_dim * pairs


def roofline_results(name: str, work: Work, seconds: float, ceilings: Ceilings) -> list[Result]:
    """What must be done, and the fraction of each ceiling that was reached doing it."""
    mfu = work.flops / seconds / ceilings.flops_per_second
    mbu = work.num_bytes / seconds / ceilings.bytes_per_second
    return [
        Result(f"{name}: at least", work.flops / 1e9, "GFLOP"),
        Result(f"{name}: MFU", mfu * 100, "%"),
        Result(f"{name}: at least to move", work.num_bytes / 1e9, "GB"),
        Result(f"{name}: MBU", mbu * 100, "%"),
    ]


def load_work(model: ModelWork, outcomes: Sequence[Outcome]) -> Work:
    """Of all answers of a load: their prompts, and decode steps as full as the load allows.

    How many rows shared a step is not known from outside: as many as were decoding on the mean.
    """
    answered = [outcome for outcome in outcomes if outcome.is_answered]
    prompts = [model.prefill(outcome.num_prompt_tokens) for outcome in answered]
    decoding = sum(o.chunk_seconds[-1] - o.chunk_seconds[0] for o in answered)
    span = max(o.chunk_seconds[-1] for o in answered) - min(o.chunk_seconds[0] for o in answered)
    batch = max(1, round(decoding / span)) if span > 0.0 else 1
    num_steps = sum(max(0, outcome.num_output_tokens - 1) for outcome in answered) / batch
    contexts = [o.num_prompt_tokens + o.num_output_tokens / 2 for o in answered]
    steps = model.decode(batch, sum(contexts) / len(contexts)).times(num_steps)
    return sum(prompts, steps)


def load_roofline(
    name: str, model: ModelWork, outcomes: Sequence[Outcome], ceilings: Ceilings
) -> list[Result]:
    """MFU and MBU of a whole load, idle times included; and of a decode step at the median TPOT."""
    answered = [outcome for outcome in outcomes if outcome.is_answered]
    if not answered or not tpots(answered):
        return []
    start = min(outcome.due_seconds for outcome in answered)
    span = max(outcome.end_seconds for outcome in answered) - start
    rate = model.weight_bytes / percentile(tpots(answered), 0.5)
    return [
        *roofline_results(name, load_work(model, answered), span, ceilings),
        Result(
            f"{name}: MBU of a decode step, its weights alone, at TPOT p50",
            rate / ceilings.bytes_per_second * 100,
            "%",
        ),
    ]
