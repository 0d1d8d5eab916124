"""What the host does for each request and step, no device: pages, queues, the decode batch.

Devices here exist on paper only: a step's results are ready when it is dispatched. Times are per
request (or per row and step) with a batch of 256. Called by the engine's benchmark.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jpd.bench.results import Result
from jpd.cache.page_allocator import PageAllocator
from jpd.cache.prefix_cache import PrefixCache
from jpd.config import CacheConfig, EngineConfig
from jpd.engine.buckets import DecodeShape, ShapeBuckets
from jpd.engine.decode import DecodeEngine
from jpd.engine.decode_row import DecodeRow
from jpd.engine.decode_state import DecodeState, empty_state
from jpd.engine.functions import ModelFunctions
from jpd.engine.results import Outcome, StepResults
from jpd.engine.sampling_rows import on_host
from jpd.engine.scheduler import PrefillScheduler
from jpd.engine.token_masks import TokenMasks
from jpd.request import SamplingParams

NUM_SLOTS = 256
PROMPT_TOKENS = 512
NUM_ROUNDS = 5
TARGET_MICROSECONDS = 20.0
CACHE = CacheConfig()
PAGES = PROMPT_TOKENS // CACHE.page_size


def run() -> list[Result]:
    per = f"per request, {NUM_SLOTS} at once"
    target = TARGET_MICROSECONDS
    return [
        Result(f"page allocator: alloc, share, free {per}", _allocator(), "us", target),
        Result(f"prefill scheduler: add, first, remove {per}", _scheduler(), "us", target),
        Result(f"decode engine, per row and step, {NUM_SLOTS} rows", _decode(), "us", target),
        Result(f"prefix cache: match, insert {PROMPT_TOKENS} tokens {per}", _prefixes(), "us"),
    ]


def _best(work: Callable[[], object], num_units: int) -> float:
    """Microseconds per unit of the quickest of some rounds."""
    seconds = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds) / num_units * 1e6


def _allocator() -> float:
    """Each takes the pages of a prompt, a second holder joins, both leave."""
    allocator = PageAllocator(NUM_SLOTS * PAGES + 1)

    def work() -> None:
        held = [allocator.alloc(PAGES) or () for _ in range(NUM_SLOTS)]
        for pages in held:
            allocator.share(pages)
        for pages in (*held, *held):
            allocator.free(pages)

    return _best(work, NUM_SLOTS)


def _prefixes() -> float:
    """Prompts that share their first half: each is looked up, and known afterwards."""
    draw = np.random.default_rng(0)
    half = draw.integers(0, 1000, PROMPT_TOKENS // 2).tolist()
    prompts = [half + draw.integers(0, 1000, len(half)).tolist() for _ in range(NUM_SLOTS)]
    allocator = PageAllocator(NUM_SLOTS * PAGES + 1)
    prefixes = PrefixCache(allocator, CACHE.page_size)

    def work() -> None:
        prefixes.clear()
        for prompt in prompts:
            known = prefixes.match(prompt)
            pages = known + (allocator.alloc(PAGES - len(known)) or ())
            prefixes.insert(prompt, pages)
            allocator.free(pages)

    return _best(work, NUM_SLOTS)


def _scheduler() -> float:
    """Prompts of mixed lengths; one is picked and leaves, until none is left."""
    lengths = np.random.default_rng(0).integers(16, 4096, NUM_SLOTS).tolist()

    def work() -> None:
        scheduler = PrefillScheduler()
        for number, length in enumerate(lengths):
            scheduler.add(str(number), length, now=0.0, priority=0, deadline=600.0)
        while task := scheduler.first(1):
            scheduler.remove(task[0])

    return _best(work, NUM_SLOTS)


def _decode(num_steps: int = 20) -> float:
    engine = paper_engine()
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * NUM_ROUNDS * num_steps)
    for number in range(NUM_SLOTS):
        engine.insert(DecodeRow(str(number), (1,), 3, (5,) * PROMPT_TOKENS, sampling))
    engine.step()

    def work() -> None:
        for _ in range(num_steps):
            engine.step()

    return _best(work, NUM_SLOTS * num_steps)


def paper_engine() -> DecodeEngine:
    """A decode engine of NUM_SLOTS slots whose devices take no time."""
    functions = _PaperFunctions()
    cache: Any = _PaperCache()
    return DecodeEngine(functions, cache, (), NUM_SLOTS)


class _PaperCache:
    layers = ()


class _PaperResults(StepResults):
    """Every row runs on."""

    def copy_to_host_async(self) -> None:
        """They are there."""

    def to_host(self) -> StepResults:
        return self


class _PaperFunctions(ModelFunctions):
    def __init__(self) -> None:
        self.num_slots = NUM_SLOTS
        self.buckets = ShapeBuckets.from_config(EngineConfig(), CACHE, 8 * PROMPT_TOKENS)
        self._results = _PaperResults(
            tokens=on_host(np.full((NUM_SLOTS, 1), 3, np.int32)),
            num_tokens=on_host(np.ones(NUM_SLOTS, np.int32)),
            outcomes=on_host(np.full(NUM_SLOTS, Outcome.RUNNING, np.int32)),
            logprobs=None,
        )

    def new_state(self) -> DecodeState:
        return empty_state(NUM_SLOTS, self.buckets.max_pages, self.buckets.page_size)

    def insert(self, state: DecodeState, row: DecodeState, slot: int) -> DecodeState:
        return state

    def decode(
        self,
        leaves: Sequence[Any],
        layers: Any,
        state: DecodeState,
        shape: DecodeShape,
        masks: TokenMasks | None = None,
    ) -> tuple[Any, DecodeState, StepResults]:
        return layers, state, self._results
