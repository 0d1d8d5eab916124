"""The floor under a step: the matrix products of a model's weights in one jitted function, no more.

Each weight is multiplied once with as many rows as the step has tokens; a product takes the latest
output of the right width, so they run one after another as in the model. No norm, no rope, no
attention, no residual. The head takes only the rows that get logits. Called by the engine's
benchmark, which divides what it measures by this.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jpd.errors import ConfigError, Problem
from jpd.nn.config import DecoderConfig
from jpd.nn.params import ParamSpec

HEADS = ("head.weight", "embed.weight")  # the second where embeddings are tied


class Floor:
    """Bare products for steps of `num_tokens` tokens, of which `num_logits` get logits."""

    def __init__(self, specs: Sequence[ParamSpec], num_tokens: int, num_logits: int) -> None:
        paths = [spec.path for spec in specs]
        head = next(path for path in HEADS if path in paths)
        self._specs = tuple(specs)
        self._head = paths.index(head)
        self._products = [
            index
            for index, spec in enumerate(specs)
            if len(spec.shape) > 1 and spec.path not in HEADS
        ]
        self._num_tokens, self._num_logits = num_tokens, num_logits
        self._run = jax.jit(self._multiply)

    @property
    def num_flops(self) -> float:
        """Of one call."""
        body = sum(math.prod(self._specs[index].shape) for index in self._products)
        head = math.prod(self._specs[self._head].shape)
        return 2.0 * (body * self._num_tokens + head * self._num_logits)

    def __call__(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Dispatch it; returns one number of each product, so that none may be left out."""
        numbers: jax.Array = self._run(tuple(leaves), jnp.int32(0))
        return numbers

    def lower(self, leaves: Sequence[jax.Array]) -> jax.stages.Lowered:
        return self._run.lower(tuple(leaves), jnp.int32(0))

    def _multiply(self, leaves: tuple[jax.Array, ...], place: jax.Array) -> jax.Array:
        latest: dict[int, jax.Array] = {}
        numbers = []
        for index in self._products:
            spec = self._specs[index]
            inner = inner_size(spec)
            weight = leaves[index].reshape(inner, -1)
            x = latest.get(inner, jnp.full((self._num_tokens, inner), 1e-3, weight.dtype))
            out = x @ weight
            latest[out.shape[1]] = out
            numbers.append(_number(out, place))
        table = leaves[self._head]
        hidden = latest[table.shape[1]][: self._num_logits]
        logits = jnp.einsum("td,vd->tv", hidden, table, preferred_element_type=jnp.float32)
        return jnp.stack([*numbers, _number(logits, place)])


def inner_size(spec: ParamSpec) -> int:
    """How many numbers of a token a weight takes: all but the last dim where it gives an embedding,
    else the first."""
    gives_embedding = spec.axes[-1] == "embed"
    return math.prod(spec.shape[:-1]) if gives_embedding else spec.shape[0]


def _number(out: jax.Array, place: jax.Array) -> jax.Array:
    """One element at a place known only at run time: the compiler cannot shrink the product."""
    return jax.lax.dynamic_slice(out, (place, place), (1, 1)).astype(jnp.float32)[0, 0]


def is_plain(config: DecoderConfig) -> bool:
    """Every weight is multiplied with every token."""
    return config.mla is None and all(layer.moe is None for layer in config.layers)


def check_plain(config: DecoderConfig, name: str) -> None:
    """Raises ConfigError unless every weight is multiplied with every token."""
    if not is_plain(config):
        rule = "the floor of a step is known of dense models only: no experts, no latent attention"
        raise ConfigError([Problem("jpd bench engine", "model", name, rule)])
