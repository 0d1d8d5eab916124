"""One worker's engines without a worker: pool, functions and engines of a model on one device.

What a benchmark drives in a worker's place: it owns the pages, adds prompts, inserts rows and calls
`step`. Shapes are those that a mesh file gets which does not choose any.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from jpd.bench.step_timeline import TimedFunctions
from jpd.cache.kv_cache import KVCache, KVSpec
from jpd.cache.page_allocator import PageAllocator
from jpd.checkpoint.load import load_params
from jpd.checkpoint.model_source import WeightSource
from jpd.config import CacheConfig, EngineConfig
from jpd.engine.buckets import ShapeBuckets
from jpd.engine.decode import DecodeEngine
from jpd.engine.decode_row import DecodeRow
from jpd.engine.prefill import PrefillEngine, PrefillTask
from jpd.nn.config import DecoderConfig
from jpd.nn.params import AbstractParams, abstract_params
from jpd.parallel.mesh import make_worker_mesh
from jpd.request import SamplingParams

DTYPE = np.dtype(np.float32)
CACHE, ENGINE = CacheConfig(), EngineConfig()
MARGIN_STEPS = 32
"""Rows may get this many tokens more than are measured: before, after, and several in a step."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on one device, float32."""

    config: DecoderConfig
    abstract: AbstractParams
    leaves: tuple[jax.Array, ...]
    mesh: Mesh


def load_model(config: DecoderConfig, source: WeightSource) -> LoadedModel:
    abstract, mesh = abstract_params(config, DTYPE), _mesh(config)
    (leaves,) = load_params(source, config, abstract, [mesh], DTYPE, check_numbers=False)
    return LoadedModel(config, abstract, leaves, mesh)


def random_model(config: DecoderConfig) -> LoadedModel:
    """With weights drawn at random, small enough that nothing overflows."""
    abstract, mesh = abstract_params(config, DTYPE), _mesh(config)
    draw = np.random.default_rng(0)
    leaves = tuple(
        jax.device_put((draw.standard_normal(spec.shape) * 0.02).astype(spec.dtype))
        for spec in abstract.specs
    )
    return LoadedModel(config, abstract, leaves, mesh)


def _mesh(config: DecoderConfig) -> Mesh:
    heads = config.num_cached_heads
    return make_worker_mesh(jax.devices()[:1], tensor=1, expert=1, num_cached_heads=heads)


class EngineRig:
    """A prefill engine and decode engines of several batch sizes over one pool.

    Nothing is compiled before it is used.
    """

    def __init__(
        self, model: LoadedModel, *, batches: Sequence[int], pool_tokens: int, max_model_len: int
    ) -> None:
        config, page_size = model.config, CACHE.page_size
        self.model, self.buckets = model, ShapeBuckets.from_config(ENGINE, CACHE, max_model_len)
        spec = KVSpec(
            num_layers=config.num_layers,
            num_pages=1 + -(-pool_tokens // page_size),
            page_size=page_size,
            num_cached_heads=config.num_cached_heads,
            kv_width=config.kv_width,
            dtype=DTYPE,
        )
        self.cache, self._allocator = KVCache(spec, model.mesh), PageAllocator(spec.num_pages)
        self.functions = {
            batch: TimedFunctions(config, DTYPE, model.mesh, spec, self.buckets, batch)
            for batch in batches
        }
        self.decode = {
            batch: DecodeEngine(of_batch, self.cache, model.leaves, batch)
            for batch, of_batch in self.functions.items()
        }
        self.prefill = PrefillEngine(
            self.functions[batches[0]], self.cache, model.leaves, lambda piece: None
        )
        self._num_attempts = 0

    def prefill_seconds(self, num_tokens: int, num_prompts: int = 1) -> float:
        """From the arrival of prompts at an idle engine to the last first token on the host."""
        token_ids = tuple(3 + number % 1000 for number in range(num_tokens))
        tasks = [
            PrefillTask(self._name(), token_ids, self._take(num_tokens), 0, _greedy(1))
            for _ in range(num_prompts)
        ]
        start = time.perf_counter()
        for task in tasks:
            self.prefill.add(task)
        while self.prefill.has_work:
            self.prefill.step()
        seconds = time.perf_counter() - start
        for task in tasks:
            self._allocator.free(task.page_ids)
        return seconds

    def decode_seconds(self, batch: int, context: int, num_steps: int) -> float:
        """Per step, of a full batch nobody joins or leaves, from `context` cached tokens on."""
        engine = self.decode[batch]
        rows = self._insert_rows(batch, context, num_steps + MARGIN_STEPS)
        for _ in range(2):  # what is new is on the device and read once
            engine.step()
        start, num_tokens = time.perf_counter(), 0
        while num_tokens < num_steps * batch and engine.has_work:
            num_tokens += sum(len(done.token_ids) for done in engine.step())
        seconds = (time.perf_counter() - start) * batch / num_tokens
        self._remove_rows(batch, rows)
        return seconds

    def _insert_rows(self, batch: int, context: int, num_steps: int) -> list[DecodeRow]:
        """Fill a decode engine with rows whose KV is whatever stands in their pages."""
        rows = []
        for _ in range(batch):
            pages = self._take(context + num_steps)
            rows.append(DecodeRow(self._name(), pages, 3, (5,) * context, _greedy(num_steps)))
            self.decode[batch].insert(rows[-1])
        return rows

    def _remove_rows(self, batch: int, rows: Sequence[DecodeRow]) -> None:
        engine = self.decode[batch]
        for row in rows:
            engine.remove(row.attempt_id)
        while engine.has_work:
            engine.step()
        for row in rows:
            self._allocator.free(row.page_ids)

    def _take(self, num_tokens: int) -> tuple[int, ...]:
        pages = self._allocator.alloc(-(-num_tokens // CACHE.page_size))
        if pages is None:
            raise ValueError(f"the pool has no {num_tokens} tokens left")
        return pages

    def _name(self) -> str:
        self._num_attempts += 1
        return f"attempt-{self._num_attempts}"


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)
