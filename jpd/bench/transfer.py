"""How fast KV moves: whole plans against plain copies, processes against each other, and the links.

A plan is gather, pull and scatter, piece after piece and all at a time, as the workers do it; a
plain copy is one `device_put` of the same bytes between two devices. On CPU devices are virtual and
share memory: a plan passes over it three times, a copy once. Called by `jpd bench transfer`.
"""

import itertools
import queue
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jpd.bench.engine_rig import LoadedModel
from jpd.bench.kv_links import exposed_results, link_results
from jpd.bench.kv_overlap import PROMPTS, QUICK_PROMPTS, overlap_results
from jpd.bench.kv_peer import KVPeer
from jpd.bench.kv_pools import Pool
from jpd.bench.results import Result
from jpd.bench.wire_error import wire_error_results
from jpd.transfer.inprocess import InProcessTransfer
from jpd.transfer.protocol import ArrivedPiece, KVTransfer
from jpd.transfer.wire import Wire

TENSORS = (1, 2, 4)
EQUAL_TARGET, RESHARD_TARGET = 0.5, 0.25
NUM_RUNS, NUM_QUICK_RUNS = 7, 3
NUM_WARM_RUNS = 3
"""The first one compiles, and both find memory that the process has touched before."""
TRANSPORTS = ("host_staged", "jax_transfer")
GIGA = 1e9


def run(model: LoadedModel, *, is_quick: bool = False) -> list[Result]:
    """All of it; needs eight CPU devices. The model is for what int8 does to logits."""
    num_runs = NUM_QUICK_RUNS if is_quick else NUM_RUNS
    results = []
    for source, target in itertools.product(TENSORS, repeat=2):
        results += pair_results(source, target, num_runs)
    results += int8_results(num_runs)
    results += wire_error_results(model)
    results += process_results(num_runs)
    prompts = QUICK_PROMPTS if is_quick else PROMPTS
    results += overlap_results(model, prompts, NUM_QUICK_RUNS)
    return [*results, *link_results(), *exposed_results()]


def pair_results(source_tensor: int, target_tensor: int, num_runs: int) -> list[Result]:
    """One pair: GB/s of the whole plan, and its share of a plain copy in the same run."""
    source, target = Pool(0, source_tensor), Pool(4, target_tensor)
    wire = source.wire_to(target)
    name = f"tensor {source_tensor} to {target_tensor}"
    plan, share = _measure_beside_copy(source, target, wire, num_runs)
    goal = EQUAL_TARGET if source_tensor == target_tensor else RESHARD_TARGET
    return [
        Result(f"{name}: gather, pull, scatter", plan / GIGA, "GB/s"),
        Result(f"{name}: share of a plain copy", share, "", goal, at_most=False),
    ]


def _measure_beside_copy(
    source: Pool, target: Pool, wire: Wire, num_runs: int
) -> tuple[float, float]:
    """Bytes per second of the plan, and its share of a plain copy's; medians of pairs of runs.

    A copy is kept until the next but one is made: without it the allocator gives memory back in
    between, and the copy is as slow as the system finds new pages.
    """
    rates, shares = [], []
    kept: deque[list[jax.Array]] = deque(maxlen=2)
    with _Mover(source, target, wire) as mover:
        for number in range(NUM_WARM_RUNS + num_runs):
            of_plan = _timed(mover.move)
            of_copy = _timed(lambda: kept.append(_copied(source)))
            if number >= NUM_WARM_RUNS:
                rates.append(source.num_bytes / of_plan)
                shares.append(of_copy / of_plan)
    return statistics.median(rates), statistics.median(shares)


def int8_results(num_runs: int) -> list[Result]:
    """What quantising on the wire saves in bytes, and costs in time and in the numbers."""
    source, target = Pool(0, 1), Pool(4, 1)
    wire = source.wire_to(target, dtype="int8")
    _, share = _measure_beside_copy(source, target, wire, num_runs)
    sent, got = source.read(), target.read()
    errors = [np.abs(one - other).max() for one, other in zip(sent, got, strict=True)]
    spread = float(np.std(sent[0]))
    saved = 1.0 - wire.num_bytes(1) / source.wire_to(target).num_bytes(1)
    return [
        Result("int8 on the wire: bytes saved of float32", saved, ""),
        Result("int8 on the wire: share of a plain copy of float32", share, ""),
        Result(
            "int8 on the wire: largest error, in standard deviations",
            float(max(errors)) / spread,
            "",
        ),
    ]


class _Mover:
    """Moves all pages of a pool into another, pulled by the in-process transfer."""

    def __init__(self, source: Pool, target: Pool, wire: Wire) -> None:
        self._source, self._target, self._wire = source, target, wire
        self._arrived: queue.SimpleQueue[ArrivedPiece] = queue.SimpleQueue()
        self._transfer: KVTransfer = InProcessTransfer(timeout_seconds=600.0)
        self._transfer.register("target", target.mesh, self._arrived.put)

    def __enter__(self) -> "_Mover":
        return self

    def __exit__(self, *error: object) -> None:
        self._transfer.close()

    def move(self) -> None:
        """Gathers are dispatched at once; pieces are written as they arrive."""
        pieces = self._source.offer_all(self._transfer.offer, "target", self._wire)
        for _ in range(pieces):
            self._target.write(self._arrived.get())
        jax.block_until_ready(self._target.cache.layers)


def _copied(source: Pool) -> list[jax.Array]:
    """The same bytes on another device, put there in one call."""
    copies: list[jax.Array] = jax.device_put(source.plain, jax.devices()[7])
    jax.block_until_ready(copies)
    return copies


def _timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def process_results(num_runs: int) -> list[Result]:
    """Both transports between two processes; the better of them is what the other is held to."""
    rates = {name: _measure_process(name, num_runs) for name in TRANSPORTS}
    best = max(rates.values())
    results: list[Result] = []
    for name, rate in rates.items():
        results += [
            Result(f"between processes, {name}", rate / GIGA, "GB/s"),
            Result(f"between processes, {name}: share of the better one", rate / best, ""),
        ]
    return results


def _measure_process(transport: str, num_runs: int) -> float:
    source = Pool(0, 1)
    with KVPeer(transport) as peer:
        seconds: Sequence[float] = [_timed(lambda: peer.move(source)) for _ in range(num_runs + 1)]
    return source.num_bytes / statistics.median(seconds[1:])  # the first one compiles
