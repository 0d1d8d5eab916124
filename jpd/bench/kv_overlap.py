"""What of a transfer shows behind a prefill, measured: a real engine sends within its process.

Exposed is the time from a prompt's first token to its last page in the other pool; hidden is the
rest of what the same pages take by themselves. Called by `jpd.bench.transfer`.
"""

import queue
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jpd.bench.engine_rig import CACHE, DTYPE, ENGINE, LoadedModel
from jpd.bench.kv_links import LAYER_GROUPS, MILLI, crossover_tokens
from jpd.bench.results import Result
from jpd.cache.kv_cache import KVCache, KVSpec
from jpd.engine.buckets import ShapeBuckets
from jpd.engine.functions import ModelFunctions
from jpd.engine.page_moves import PageMoves
from jpd.engine.page_outlet import PageOutlet
from jpd.engine.prefill import PrefillEngine, PrefillTask
from jpd.parallel.mesh import make_worker_mesh
from jpd.request import SamplingParams
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.plan import KVLayout, Link, plan_transfer
from jpd.transfer.protocol import ArrivedPiece

PROMPTS, QUICK_PROMPTS = (256, 1024, 2048), (256, 1024)
TARGET, TARGET_DEVICE = "target", 4
PIECE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one prompt, medians."""

    num_tokens: int
    prefill: float  # added → first token on the host
    exposed: float
    alone: float  # of all its pages, with nothing computed meanwhile

    @property
    def hidden(self) -> float:
        return max(0.0, self.alone - self.exposed)


class OverlapRig:
    """A prefill engine on the model's device, and a pool on another one."""

    def __init__(self, model: LoadedModel, longest: int) -> None:
        config, page_size = model.config, CACHE.page_size
        self.page_ids = tuple(range(1, 2 + longest // page_size))
        buckets = ShapeBuckets.from_config(ENGINE, CACHE, longest + page_size)
        spec = KVSpec(
            num_layers=config.num_layers,
            num_pages=1 + len(self.page_ids),
            page_size=page_size,
            num_cached_heads=config.num_cached_heads,
            kv_width=config.kv_width,
            dtype=DTYPE,
        )
        device = jax.devices()[TARGET_DEVICE]
        mesh = make_worker_mesh(
            [device], tensor=1, expert=1, num_cached_heads=config.num_cached_heads
        )
        self.token_bytes, self._page_size = spec.token_bytes, page_size
        self._cache, self._target = KVCache(spec, model.mesh), KVCache(spec, mesh)
        self._moves = PageMoves(spec, mesh)
        functions = ModelFunctions(config, DTYPE, model.mesh, spec, buckets, num_slots=1)
        plan = plan_transfer(KVLayout(1, 1), KVLayout(1, 1), spec.token_bytes)
        wires = {TARGET: plan.wire(page_size, buckets.page_moves, str(DTYPE), has_checksum=False)}
        self._transfer = InProcessTransfer(PIECE_SECONDS)
        self._arrived: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
        self._transfer.register(TARGET, mesh, self._arrived.put)
        offer = self._transfer.offer
        self._outlet = PageOutlet(functions.moves, self._cache, offer, wires)
        self._engine = PrefillEngine(functions, self._cache, model.leaves, offer, wires)

    def close(self) -> None:
        self._transfer.close()

    def measure(self, num_tokens: int, num_runs: int) -> Measured:
        """The first runs of both kinds compile, and do not count."""
        runs = [self._prefill(num_tokens) for _ in range(num_runs + 1)][1:]
        alone = [self._move(num_tokens) for _ in range(num_runs + 1)][1:]
        prefills, exposed = zip(*runs, strict=True)
        return Measured(
            num_tokens,
            statistics.median(prefills),
            statistics.median(exposed),
            statistics.median(alone),
        )

    def _prefill(self, num_tokens: int) -> tuple[float, float]:
        """Seconds until the first token, and from there to the last page."""
        token_ids = tuple(3 + number % 1000 for number in range(num_tokens))
        task = PrefillTask(
            "bench",
            token_ids,
            self.page_ids,
            0,
            SamplingParams(temperature=0.0, max_tokens=1),
            destination=TARGET,
        )
        ends: list[float] = []
        writer = threading.Thread(target=lambda: ends.append(self._write_all()))
        start = time.perf_counter()
        writer.start()
        self._engine.add(task)
        while self._engine.has_work:
            self._engine.step()
        first_token = time.perf_counter()
        writer.join()
        return first_token - start, max(0.0, ends[0] - first_token)

    def _move(self, num_tokens: int) -> float:
        """Seconds of all pages of a prompt, from their gathers to their places."""
        start, num_pages = time.perf_counter(), -(-num_tokens // self._page_size)
        self._outlet.send("bench", TARGET, self.page_ids, 0, num_pages, is_end=True)
        return self._write_all() - start

    def _write_all(self) -> float:
        """Write pieces as they arrive, up to the last one; when that stood in its place."""
        is_last = False
        while not is_last:
            piece = self._arrived.get()
            if piece.error is not None:
                raise piece.error
            places = self.page_ids[piece.pages.start : piece.pages.stop]
            self._moves.scatter(self._target, piece.arrays, places, piece.layers)
            is_last = piece.is_last
        jax.block_until_ready(self._target.layers)
        return time.perf_counter()


def overlap_results(model: LoadedModel, prompts: Sequence[int], num_runs: int) -> list[Result]:
    """By prompt length; and, by the rates of the longest, from where layer groups would pay."""
    rig = OverlapRig(model, max(prompts))
    try:
        found = [rig.measure(num_tokens, num_runs) for num_tokens in prompts]
    finally:
        rig.close()
    results = []
    for one in found:
        name = f"{one.num_tokens:,} tokens, in process, measured"
        results += [
            Result(f"{name}: prefill", one.prefill / MILLI, "ms"),
            Result(f"{name}: transfer exposed", one.exposed / MILLI, "ms"),
            Result(f"{name}: transfer hidden", one.hidden / MILLI, "ms"),
        ]
    return results + _crossovers(found[-1], rig.token_bytes)


def _crossovers(longest: Measured, token_bytes: int) -> list[Result]:
    rate = longest.num_tokens * token_bytes / max(longest.alone, 1e-9)
    link = Link("in process", rate, "measured")
    token_seconds = longest.prefill / longest.num_tokens
    return [
        Result(
            f"in process, at these rates: {groups} layer groups would pay from",
            crossover_tokens(link, token_bytes, token_seconds, groups),
            "tokens",
        )
        for groups in LAYER_GROUPS
    ]
