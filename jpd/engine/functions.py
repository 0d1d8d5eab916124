"""The executables of one model on one worker's mesh. Everything the engines run on devices is here.

A step is two of them, dispatched one after the other: the model by the step's shape, the choice of
tokens by its number of rows. All shardings are pinned, KV pools and decode states are donated,
weights cross as a flat tuple of arrays. Knows no attempts. Called on the worker's thread, by the
engines and by `jpd verify --golden`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jpd.cache.kv_cache import POOL_AXES, KVCache, KVSpec
from jpd.engine.buckets import ChunkShape, DecodeShape, ShapeBuckets, decode_rows
from jpd.engine.choose import choose_first, choose_next
from jpd.engine.decode_state import DecodeState, add_pages, deactivate, empty_state, insert_row
from jpd.engine.forward import (
    Layers,
    Leaves,
    chunk_logits,
    chunk_logprobs,
    forward_chunk,
    forward_step,
)
from jpd.engine.grouped_chunk import AfterGroup, GroupedChunk
from jpd.engine.logprobs import LogprobArrays
from jpd.engine.page_moves import PageMoves
from jpd.engine.prefill_chunk import (
    ChunkEnds,
    ChunkPrompt,
    PrefillChunk,
    empty_chunk,
    make_chunk,
    prompt_rows,
)
from jpd.engine.results import StepResults
from jpd.engine.sampling_rows import greedy_rows
from jpd.engine.steps import several_steps, verify_step
from jpd.engine.token_masks import TokenMasks, open_masks
from jpd.kernels.backends import AttentionBackend, AttentionName
from jpd.nn.config import DecoderConfig
from jpd.nn.params import abstract_params
from jpd.parallel.sharding import sharding_for
from jpd.transfer.wire import Wire


class ModelFunctions:
    """Jitted once, for both engines of a worker. `param_shardings` is where its weights must be."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: DTypeLike,
        mesh: Mesh,
        spec: KVSpec,
        buckets: ShapeBuckets,
        num_slots: int,
        attention: AttentionName = "blocks",
    ) -> None:
        self.vocab_size = config.vocab_size
        self.mesh, self.spec, self.buckets, self.num_slots = mesh, spec, buckets, num_slots
        self.moves = PageMoves(spec, mesh)
        backend = AttentionBackend.on(attention, mesh)
        params = abstract_params(config, dtype, backend, is_split=mesh.size > 1)
        self._definition = params.graphdef
        groups = buckets.layer_groups
        self.param_shardings: tuple[NamedSharding, ...] = tuple(
            sharding_for(mesh, param.axes, param.shape) for param in params.specs
        )
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._pool = (sharding_for(mesh, POOL_AXES, spec.layer_shape),) * spec.num_layers
        self._logits = sharding_for(mesh, (None, "vocab"), (1, config.vocab_size))
        self._grouped = None
        if not groups.is_whole:
            self._grouped = GroupedChunk(
                config,
                dtype,
                backend,
                groups,
                params,
                self.param_shardings,
                self._pool[0],
                self._logits,
                mesh,
            )
        self._jit_prefill()
        self._jit_decode()
        self._put_defaults()
        in_place: dict[str, Any] = {"out_shardings": self._replicated, "donate_argnums": 0}
        self._insert = jax.jit(insert_row, **in_place)
        self._deactivate = jax.jit(deactivate, **in_place)
        self._add_pages = jax.jit(add_pages, **in_place)

    def _jit_prefill(self) -> None:
        self._forward_chunk = self._jit_model(
            forward_chunk, (self._replicated,) * 2, (self._replicated, self._logits)
        )
        self._choose_first = jax.jit(
            choose_first,
            in_shardings=(self._replicated, self._logits, self._replicated),
            out_shardings=self._replicated,
        )
        self._chunk_logprobs = jax.jit(
            _named(functools.partial(chunk_logprobs, self._definition), "chunk_logprobs"),
            in_shardings=(self.param_shardings, *(self._replicated,) * 4),
            out_shardings=self._replicated,
        )
        self._check_logits = self._jit_model(
            chunk_logits, (self._replicated,) * 2, (self._replicated,)
        )

    def _jit_decode(self) -> None:
        shapes = self.buckets.decode_shapes(self.num_slots)
        self._forward_step = {
            (shape.num_rows, shape.width): self._jit_forward_step(shape)
            for shape in shapes
            if shape.is_one_step
        }
        self._choose_next = jax.jit(
            choose_next,
            in_shardings=(self._replicated, self._logits, self._replicated),
            out_shardings=self._replicated,
            donate_argnums=0,
        )
        self._several = {
            shape: self._jit_several(shape) for shape in shapes if not shape.is_one_step
        }

    def _put_defaults(self) -> None:
        """Inputs of calls that ask for nothing special, on the devices, so that nothing travels."""
        chunk_rows = {layout.num_rows for layout in self.buckets.prefill_layouts}
        size = self.buckets.max_pages * self.buckets.page_size
        self._no_history: dict[int, jax.Array] = {
            num_rows: jax.device_put(np.zeros((num_rows, size), np.int32), self._replicated)
            for num_rows in chunk_rows
        }
        self._open_masks: dict[int, TokenMasks] = {
            num_rows: jax.device_put(open_masks(num_rows, self.vocab_size), self._replicated)
            for num_rows in {*decode_rows(self.num_slots), *chunk_rows}
        }

    def _jit_model(
        self, step: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
    ) -> jax.stages.Wrapped:
        """A function of weights and pages that gives the pages back, in place."""
        return jax.jit(
            _named(functools.partial(step, self._definition), step.__name__),
            in_shardings=(self.param_shardings, self._pool, *inputs),
            out_shardings=(self._pool, *outputs),
            donate_argnums=1,
        )

    def _jit_forward_step(self, shape: DecodeShape) -> jax.stages.Wrapped:
        step = functools.partial(forward_step, self._definition, shape.width)
        return jax.jit(
            _named(step, f"forward_step_{shape.num_rows}x{shape.width}"),
            in_shardings=(self.param_shardings, self._pool, *(self._replicated,) * 2),
            out_shardings=(self._pool, self._logits),
            donate_argnums=1,
        )

    def _jit_several(self, shape: DecodeShape) -> jax.stages.Wrapped:
        inner = verify_step if shape.num_drafts else several_steps
        name = f"verify_{shape.num_drafts}" if shape.num_drafts else f"decode_{shape.num_steps}"
        step = functools.partial(inner, self._definition, shape)
        return jax.jit(
            _named(step, f"{name}_steps_{shape.num_rows}x{shape.width}"),
            in_shardings=(self.param_shardings, self._pool, *(self._replicated,) * 2),
            out_shardings=(self._pool, self._replicated, self._replicated),
            donate_argnums=(1, 2),
        )

    def prefill(
        self,
        leaves: Leaves,
        layers: Layers,
        chunk: PrefillChunk,
        ends: ChunkEnds,
        masks: TokenMasks | None = None,
        *,
        wants_prompt_logprobs: bool = False,
        after_group: AfterGroup = lambda number, layers: None,
    ) -> tuple[Layers, StepResults, LogprobArrays | None]:
        """Compute one chunk. `masks` None: no row is guided. Donates layers.

        The last result is of the prompt's own tokens [R, T], if it is wanted. `after_group` is
        called as soon as a layer group is dispatched; for the last one, or all layers in one call,
        behind the choice of tokens: that waits for no gather.
        """
        num_rows = chunk.start.shape[0]
        if ends.history is not self._no_history[num_rows]:  # to be placed like it
            history = jax.device_put(ends.history, self._replicated)
            ends = dataclasses.replace(ends, history=history)
        if self._grouped is None:
            layers, hidden, logits = self._forward_chunk(leaves, layers, chunk, ends)
        else:
            layers, hidden, logits = self._grouped.run(leaves, layers, chunk, ends, after_group)
        results = self._choose_first(ends, logits, self._masks(masks, num_rows))
        of_prompt = None
        if wants_prompt_logprobs:
            of_prompt = self._chunk_logprobs(
                leaves, hidden, chunk.tokens, chunk.num_valid, chunk.next_token
            )
        after_group(self.buckets.layer_groups.num_groups - 1, layers)
        return layers, results, of_prompt

    def no_history(self, num_rows: int) -> jax.Array:
        """For a chunk without penalties: on the devices, so that nothing travels."""
        return self._no_history[num_rows]

    def decode(
        self,
        leaves: Leaves,
        layers: Layers,
        state: DecodeState,
        shape: DecodeShape,
        masks: TokenMasks | None = None,
    ) -> tuple[Layers, DecodeState, StepResults]:
        """Tokens for every active slot. `shape`, of ShapeBuckets.decode_shapes: its rows cover all
        active slots, its width all their tokens after the call. `masks` None: no slot is guided;
        else the shape is one of a single step.

        Donates layers and state.
        """
        on_devices = self._masks(masks, shape.num_rows)
        if not shape.is_one_step:
            layers, state, results = self._several[shape](leaves, layers, state, on_devices)
            return layers, state, results
        forward = self._forward_step[shape.num_rows, shape.width]
        layers, logits = forward(leaves, layers, state, on_devices.paused)
        state, results = self._choose_next(state, logits, on_devices)
        return layers, state, results

    def lower_prefill(self, leaves: Leaves, layers: Layers) -> Iterator[jax.stages.Lowered]:
        """Every executable of `prefill`, one after another, for `compile_all`."""
        done: set[object] = set()
        for shape in self.buckets.prefill_shapes:
            chunk, ends = empty_chunk(shape, self._no_history[shape.num_rows])
            if self._grouped is None:
                lowered = self._forward_chunk.lower(leaves, layers, chunk, ends)
                yield lowered
                _, hidden, logits = lowered.out_info
            else:
                is_new = shape[:2] not in done
                hidden, logits = yield from self._grouped.lower(
                    leaves, layers, chunk, ends, is_new_layout=is_new
                )
            if shape.num_rows not in done:
                masks = self._open_masks[shape.num_rows]
                yield self._choose_first.lower(ends, logits, masks)
            if shape[:2] not in done:
                of_chunk = (chunk.tokens, chunk.num_valid, chunk.next_token)
                yield self._chunk_logprobs.lower(leaves, hidden, *of_chunk)
            done |= {shape.num_rows, shape[:2]}

    def lower_decode(
        self, leaves: Leaves, layers: Layers, state: DecodeState
    ) -> Iterator[jax.stages.Lowered]:
        """Every executable of `decode`, one after another, for `compile_all`."""
        rows_done: set[int] = set()
        for shape in self.buckets.decode_shapes(self.num_slots):
            masks = self._open_masks[shape.num_rows]
            if not shape.is_one_step:
                yield self._several[shape].lower(leaves, layers, state, masks)
                continue
            forward = self._forward_step[shape.num_rows, shape.width]
            lowered = forward.lower(leaves, layers, state, masks.paused)
            yield lowered
            if shape.num_rows not in rows_done:
                rows_done.add(shape.num_rows)
                yield self._choose_next.lower(state, lowered.out_info[1], masks)

    def _masks(self, masks: TokenMasks | None, num_rows: int) -> TokenMasks:
        """On the devices always: a call with arrays of the host would be another executable."""
        if masks is None:
            return self._open_masks[num_rows]
        on_devices: TokenMasks = jax.device_put(masks, self._replicated)
        return on_devices

    def insert(self, state: DecodeState, row: DecodeState, slot: int) -> DecodeState:
        """Put a state of one slot into a slot. Donates `state`."""
        updated: DecodeState = self._insert(state, row, np.int32(slot))
        return updated

    def deactivate(self, state: DecodeState, slot: int) -> DecodeState:
        """Stop a slot. Donates `state`."""
        updated: DecodeState = self._deactivate(state, np.int32(slot))
        return updated

    def add_pages(self, state: DecodeState, pages: Sequence[tuple[int, int, int]]) -> DecodeState:
        """Put pages (slot, column, page id) into page tables. Donates `state`."""
        for start in range(0, len(pages), self.num_slots):
            part = pages[start : start + self.num_slots]
            columns = np.full((3, self.num_slots), self.num_slots, np.int32)
            columns[:, : len(part)] = np.transpose(part)
            state = self._add_pages(state, *columns)
        return state

    def new_state(self) -> DecodeState:
        """Idle slots, on the devices."""
        empty = empty_state(self.num_slots, self.buckets.max_pages, self.buckets.page_size)
        state: DecodeState = jax.device_put(empty, self._replicated)
        return state

    def logits(
        self, leaves: Leaves, token_ids: Sequence[int], wire: Wire | None = None
    ) -> "np.ndarray[Any, Any]":
        """float32 logits [T, V] at every position, through the same chunked, paged path.

        With a `wire`, which must be uncut, each chunk sees the KV of those before it as that wire
        delivers it. In a pool of its own; compiled when first called. Blocks.
        """
        num_pages = self.buckets.context_width(len(token_ids))
        cache = KVCache(dataclasses.replace(self.spec, num_pages=num_pages + 1), self.mesh)
        last = len(token_ids) - 1
        prompt = ChunkPrompt(token_ids, range(1, num_pages + 1), greedy_rows(1), last)
        found = []
        for start in range(0, len(token_ids), self.buckets.prefill_chunk):
            num_tokens = min(self.buckets.prefill_chunk, len(token_ids) - start)
            layout = self.buckets.chunk_layout(num_tokens)
            shape = ChunkShape(*layout, self.buckets.context_width(start + num_tokens))
            rows = prompt_rows(prompt, start, num_tokens, layout.row_length)
            chunk, ends = make_chunk(shape, rows, self.no_history(shape.num_rows))
            cache.layers, logits = self._check_logits(leaves, cache.layers, chunk, ends)
            if wire is not None:
                self._send_to_itself(cache, wire, start, start + num_tokens)
            flat = np.asarray(logits).reshape(layout.num_tokens, -1)
            found.append(flat[:num_tokens])  # all rows but the last are full
        return np.concatenate(found)

    def _send_to_itself(self, cache: KVCache, wire: Wire, start: int, end: int) -> None:
        """What a transfer would make of the pages of these positions."""
        page_ids = range(1, cache.spec.num_pages)
        first = start // wire.page_size
        for num_pages in wire.split(-(-end // wire.page_size) - first):
            arrays = self.moves.gather(cache, page_ids, wire, first, num_pages)
            self.moves.scatter(cache, arrays, page_ids[first : first + num_pages])
            first += num_pages


def _named(step: Any, name: str) -> Any:
    """Executables carry this name in profiles and compile logs."""
    step.__name__ = name
    return step
