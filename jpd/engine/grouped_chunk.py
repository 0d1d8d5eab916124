"""A prefill chunk run layer group by layer group, so that pages leave while layers are computed.

Before the groups stands the embedding, behind them the logits. Groups of the same kinds of layers
are one executable, called with other weights and other pages. What `forward_chunk` is for the whole
model; made and called by `jpd.engine.functions`.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jpd.engine.forward import Layers, Leaves, embed_chunk, finish_chunk, forward_group
from jpd.engine.prefill_chunk import ChunkEnds, PrefillChunk
from jpd.kernels.backends import AttentionBackend
from jpd.nn.config import DecoderConfig
from jpd.nn.layer_groups import LayerGroups, kinds_of
from jpd.nn.params import AbstractParams, group_def

AfterGroup = Callable[[int, Layers], None]
"""Hears which group's pages are written, and all pages as they are then."""


@dataclass(frozen=True, slots=True)
class _Group:
    """One group: its layers, where its weights stand among the model's, and its executable."""

    layers: range
    places: tuple[int, ...]
    forward: jax.stages.Wrapped
    is_first: bool  # of its kind: the others find its executable made

    def weights(self, leaves: Leaves) -> Leaves:
        return tuple(leaves[place] for place in self.places)

    def pages(self, layers: Layers) -> Layers:
        return layers[self.layers.start : self.layers.stop]


class GroupedChunk:
    """The executables of a model whose chunks are run in groups."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: DTypeLike,
        backend: AttentionBackend,
        groups: LayerGroups,
        params: AbstractParams,
        param_shardings: Sequence[NamedSharding],
        pool: NamedSharding,
        logits: NamedSharding,
        mesh: Mesh,
    ) -> None:
        """`pool` is the sharding of one layer's pages, `logits` that of a row's."""
        self._replicated = NamedSharding(mesh, PartitionSpec())
        weights = tuple(param_shardings)
        self._embed = jax.jit(
            _named(functools.partial(embed_chunk, params.graphdef), "embed_chunk"),
            in_shardings=(weights, self._replicated),
            out_shardings=self._replicated,
        )
        self._finish = jax.jit(
            _named(functools.partial(finish_chunk, params.graphdef), "finish_chunk"),
            in_shardings=(weights, *(self._replicated,) * 3),
            out_shardings=logits,
        )
        self._groups: list[_Group] = []
        made: dict[Any, tuple[Any, jax.stages.Wrapped]] = {}
        for layers in groups.ranges:
            kinds = kinds_of(config.layers, layers)
            is_first = kinds not in made
            if is_first:
                definition = group_def(config, kinds, dtype, backend, is_split=mesh.size > 1)
                places = definition.places(params.specs, layers.start)
                shardings = tuple(weights[place] for place in places)
                made[kinds] = definition, self._jit_group(definition, shardings, pool)
            definition, forward = made[kinds]
            places = definition.places(params.specs, layers.start)
            self._groups.append(_Group(layers, places, forward, is_first))

    def _jit_group(self, definition: Any, weights: Any, pool: NamedSharding) -> jax.stages.Wrapped:
        return jax.jit(
            _named(functools.partial(forward_group, definition), "forward_group"),
            in_shardings=(weights, pool, *(self._replicated,) * 3),
            out_shardings=(pool, self._replicated),
            donate_argnums=(1, 2),
        )

    def run(
        self,
        leaves: Leaves,
        layers: Layers,
        chunk: PrefillChunk,
        ends: ChunkEnds,
        after_group: AfterGroup,
    ) -> tuple[Layers, jax.Array, jax.Array]:
        """As `forward_chunk`; `after_group` hears of all groups but the last. Donates layers."""
        chunk, last_position = self._on_devices(chunk, ends)
        hidden = self._embed(leaves, chunk.tokens)
        for number, group in enumerate(self._groups):
            if number:
                after_group(number - 1, layers)
            pages, hidden = group.forward(
                group.weights(leaves), group.pages(layers), hidden, chunk, last_position
            )
            layers = (*layers[: group.layers.start], *pages, *layers[group.layers.stop :])
        return layers, hidden, self._finish(leaves, hidden, chunk.num_valid, ends.is_last)

    def lower(
        self,
        leaves: Leaves,
        layers: Layers,
        chunk: PrefillChunk,
        ends: ChunkEnds,
        *,
        is_new_layout: bool,
    ) -> Generator[jax.stages.Lowered, None, tuple[Any, Any]]:
        """What `run` calls for a chunk of this shape; ends with what hidden states and logits are.

        `is_new_layout`: no other shape with as many rows and tokens came before.
        """
        chunk, last_position = self._on_devices(chunk, ends)
        embed = self._embed.lower(leaves, chunk.tokens)
        hidden = embed.out_info
        finish = self._finish.lower(leaves, hidden, chunk.num_valid, ends.is_last)
        if is_new_layout:
            yield embed
            yield finish
        for group in self._groups:
            if group.is_first:
                yield group.forward.lower(
                    group.weights(leaves), group.pages(layers), hidden, chunk, last_position
                )
        return hidden, finish.out_info

    def _on_devices(self, chunk: PrefillChunk, ends: ChunkEnds) -> tuple[PrefillChunk, jax.Array]:
        """Once for all groups."""
        placed: tuple[PrefillChunk, jax.Array] = jax.device_put(
            (chunk, ends.last_position), self._replicated
        )
        return placed


def _named(step: Any, name: str) -> Any:
    """Executables carry this name in profiles and compile logs."""
    step.__name__ = name
    return step
