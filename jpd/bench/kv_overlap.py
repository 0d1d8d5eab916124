"""What of a transfer shows behind a prefill, measured: a real engine sends within its process.

Exposed is the time from a prompt's first token to its last page in the other pool; hidden is the
rest of what the same pages take by themselves. The same prompts are prefilled in whole chunks and
in layer groups, in turns. Called by `jpd.bench.transfer`.
"""

import math
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from jpd.bench.engine_rig import CACHE, DTYPE, ENGINE, LoadedModel
from jpd.bench.kv_links import MILLI, crossover_tokens
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
from jpd.transfer.plan import LINKS, KVLayout, Link, plan_transfer
from jpd.transfer.protocol import ArrivedPiece

PROMPTS, QUICK_PROMPTS = (256, 1024, 2048), (256, 1024)
TARGET, TARGET_DEVICE = "target", 4
PIECE_SECONDS = 600.0
GROUPS = 3
"""Of Gemma 3 270M's eighteen layers: five with windows and one without each, so all are alike."""

CALL_TOKENS, NUM_CALL_RUNS = 16, 15


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one prompt, run one way; medians."""

    num_tokens: int
    prefill: float  # added → first token on the host
    exposed: float
    alone: float  # of all its pages, with nothing computed meanwhile

    @property
    def hidden(self) -> float:
        return max(0.0, self.alone - self.exposed)


@dataclass(frozen=True, slots=True)
class Both:
    """One prompt both ways."""

    whole: Measured
    grouped: Measured
    gained: float  # seconds that KV is complete earlier with groups; median of pairs of runs


class OverlapRig:
    """A prefill engine on the model's device, and a pool on another one."""

    def __init__(self, model: LoadedModel, longest: int, groups: int) -> None:
        config, page_size = model.config, CACHE.page_size
        self.page_ids = tuple(range(1, 2 + longest // page_size))
        engine = replace(ENGINE, layer_groups=groups)
        buckets = ShapeBuckets.from_config(engine, CACHE, longest + page_size, config.layers)
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
        wires = {TARGET: plan.wire(page_size, buckets.page_moves, str(DTYPE), False, groups)}
        self._transfer = InProcessTransfer(PIECE_SECONDS)
        self._arrived: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
        self._transfer.register(TARGET, mesh, self._arrived.put)
        offer = self._transfer.offer
        self._outlet = PageOutlet(functions.moves, self._cache, offer, wires)
        self._engine = PrefillEngine(functions, self._cache, model.leaves, offer, wires)

    def close(self) -> None:
        self._transfer.close()

    def prefill(self, num_tokens: int) -> tuple[float, float]:
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

    def move(self, num_tokens: int) -> float:
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


def measure_both(whole: OverlapRig, grouped: OverlapRig, num_tokens: int, num_runs: int) -> Both:
    """In turns; the first runs of each kind compile, and do not count."""
    ways = (whole, grouped)
    turns = [[rig.prefill(num_tokens) for rig in ways] for _ in range(num_runs + 1)][1:]
    moves = [[rig.move(num_tokens) for rig in ways] for _ in range(num_runs + 1)][1:]

    def medians(way: int) -> Measured:
        prefills, exposed = zip(*(turn[way] for turn in turns), strict=True)
        columns = prefills, exposed, [turn[way] for turn in moves]
        return Measured(num_tokens, *map(statistics.median, columns))

    gained = statistics.median(sum(of_whole) - sum(of_groups) for of_whole, of_groups in turns)
    return Both(medians(0), medians(1), gained)


def measure_call(whole: OverlapRig, grouped: OverlapRig) -> float:
    """Seconds that a layer group adds to a chunk: of the smallest, of which it is the most."""
    turns = [
        [rig.prefill(CALL_TOKENS)[0] for rig in (whole, grouped)] for _ in range(NUM_CALL_RUNS + 1)
    ][1:]
    added = statistics.median(of_groups - of_whole for of_whole, of_groups in turns)
    return max(0.0, added) / GROUPS


def overlap_results(model: LoadedModel, prompts: Sequence[int], num_runs: int) -> list[Result]:
    """By prompt length, with whole chunks and in layer groups; and from where groups pay."""
    whole, grouped = (OverlapRig(model, max(prompts), groups) for groups in (1, GROUPS))
    try:
        call_seconds = measure_call(whole, grouped)
        found = [measure_both(whole, grouped, num_tokens, num_runs) for num_tokens in prompts]
    finally:
        whole.close()
        grouped.close()
    results = []
    for one in found:
        name = f"{one.whole.num_tokens:,} tokens, in process, measured"
        results += _measured_results(name, one.whole)
        results += _measured_results(f"{name}, {GROUPS} layer groups", one.grouped)
        gained = Result(f"{name}: KV is whole earlier with groups by", one.gained / MILLI, "ms")
        results.append(gained)
    paying = (one.whole.num_tokens for one in found if one.gained > 0)
    crossover = float(min(paying, default=math.inf))
    name = f"in process, measured: {GROUPS} layer groups pay from"
    results.append(Result(name, crossover, "tokens"))
    return results + _crossovers(found[-1].whole, whole.token_bytes, call_seconds)


def _measured_results(name: str, one: Measured) -> list[Result]:
    return [
        Result(f"{name}: prefill", one.prefill / MILLI, "ms"),
        Result(f"{name}: transfer exposed", one.exposed / MILLI, "ms"),
        Result(f"{name}: transfer hidden", one.hidden / MILLI, "ms"),
    ]


def _crossovers(longest: Measured, token_bytes: int, call_seconds: float) -> list[Result]:
    """Worked out for this machine's devices, as if its measured rates held for every length."""
    rate = longest.num_tokens * token_bytes / max(longest.alone, 1e-9)
    token_seconds = longest.prefill / longest.num_tokens
    results = [Result("in process, measured: one more layer group", call_seconds / MILLI, "ms")]
    for link in (Link("in process", rate, "measured"), *LINKS):
        crossover = crossover_tokens(
            link, token_bytes, token_seconds, GROUPS, call_seconds=call_seconds
        )
        name = f"from measured group times, {link.name}: {GROUPS} layer groups would pay from"
        results.append(Result(name, crossover, "tokens"))
    return results
