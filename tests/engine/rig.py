"""One worker's devices without a worker: functions, pool and weights of a golden model.

Rigs are compiled once per test session, so tests share them: each takes its own pages from the
allocator and leaves no work behind.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jpd.cache.kv_cache import KVCache, KVSpec
from jpd.cache.page_allocator import PageAllocator
from jpd.checkpoint.load import load_params
from jpd.checkpoint.model_source import open_model
from jpd.config import CacheConfig, EngineConfig
from jpd.engine.buckets import ShapeBuckets
from jpd.engine.decode import DecodeEngine
from jpd.engine.decode_row import DecodeRow
from jpd.engine.functions import ModelFunctions
from jpd.engine.prefill import PrefillDone, PrefillEngine, PrefillTask
from jpd.nn.config import DecoderConfig
from jpd.nn.params import abstract_params
from jpd.parallel.mesh import kv_partitions, make_worker_mesh
from jpd.request import SamplingParams
from jpd.transfer.plan import KVLayout, plan_transfer
from jpd.transfer.protocol import KVPiece
from jpd.transfer.wire import Wire

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
PAGE = 16
CHUNK = 32
MAX_LEN = 288
NUM_SLOTS = 4
NUM_PAGES = 80
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
SEVERAL_STEPS = EngineConfig(prefill_chunk=CHUNK, max_model_len=MAX_LEN, max_steps_per_call=4)


@functools.cache
def golden_config(name: str) -> DecoderConfig:
    return open_model(str(GOLDEN / name)).config


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        return dict(arrays)


@dataclass
class Rig:
    """What one worker owns."""

    functions: ModelFunctions
    cache: KVCache
    leaves: tuple[jax.Array, ...]
    allocator: PageAllocator = field(default_factory=lambda: PageAllocator(NUM_PAGES))
    pieces: list[KVPiece] = field(default_factory=list)

    def prefill_engine(self, **wires: Wire) -> PrefillEngine:
        return PrefillEngine(self.functions, self.cache, self.leaves, self.pieces.append, wires)

    def decode_engine(self, wires: Sequence[Wire] = ()) -> DecodeEngine:
        return DecodeEngine(self.functions, self.cache, self.leaves, NUM_SLOTS, wires)

    def take(self, num_tokens: int) -> tuple[int, ...]:
        pages = self.allocator.alloc(-(-num_tokens // PAGE))
        assert pages is not None
        return pages

    def wire_to(self, target: "Rig") -> Wire:
        """As stored, in the layer groups in which it is computed here."""
        layouts = [
            KVLayout(kv_partitions(on.cache.mesh), on.cache.mesh.size) for on in (self, target)
        ]
        plan = plan_transfer(*layouts, self.cache.spec.token_bytes)
        sizes = target.functions.buckets.page_moves
        groups = self.functions.buckets.layer_groups.num_groups
        return plan.wire(target.cache.spec.page_size, sizes, "float32", False, groups)


def make_rig(
    name: str,
    tensor: int = 1,
    first_device: int = 0,
    chunk: int = CHUNK,
    *,
    engine: EngineConfig | None = None,
) -> Rig:
    """A rig on `tensor` devices from first_device on."""
    engine = engine or EngineConfig(prefill_chunk=chunk, max_model_len=MAX_LEN)
    return make_rigs(name, [make_mesh(name, tensor, 1, first_device)], engine)[0]


def make_mesh(name: str, tensor: int, expert: int, first_device: int) -> Mesh:
    """Of `tensor` x `expert` devices from first_device on."""
    heads = golden_config(name).num_cached_heads
    devices = jax.devices()[first_device : first_device + tensor * expert]
    return make_worker_mesh(devices, tensor=tensor, expert=expert, num_cached_heads=heads)


def make_rigs(name: str, meshes: Sequence[Mesh], engine: EngineConfig) -> list[Rig]:
    """One on each mesh; the weights are read once for all."""
    config = golden_config(name)
    buckets = ShapeBuckets.from_config(
        engine, CacheConfig(page_size=PAGE), engine.served_len(MAX_LEN), config.layers
    )
    spec = KVSpec(
        num_layers=config.num_layers,
        num_pages=NUM_PAGES,
        page_size=PAGE,
        num_cached_heads=config.num_cached_heads,
        kv_width=config.kv_width,
        dtype=np.float32,
    )
    source = open_model(str(GOLDEN / name)).source
    assert source is not None
    abstract = abstract_params(config, np.float32)
    loaded = load_params(source, config, abstract, meshes, np.float32)
    return [
        Rig(
            ModelFunctions(config, np.float32, mesh, spec, buckets, NUM_SLOTS),
            KVCache(spec, mesh),
            leaves,
        )
        for mesh, leaves in zip(meshes, loaded, strict=True)
    ]


rig = functools.cache(make_rig)


def run_prefill(engine: PrefillEngine, *tasks: PrefillTask) -> dict[str, PrefillDone]:
    for task in tasks:
        engine.add(task)
    done: dict[str, PrefillDone] = {}
    while engine.has_work:
        done |= {one.attempt_id: one for one in engine.step()}
    return done


def run_decode(engine: DecodeEngine, *rows: DecodeRow) -> dict[str, list[int]]:
    """All tokens of each row, its first one included."""
    tokens = {row.attempt_id: [row.first_token_id] for row in rows}
    for row in rows:
        engine.insert(row)
    while engine.has_work:
        for done in engine.step():
            tokens[done.attempt_id] += done.token_ids
    return tokens


def generate(
    on: Rig,
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    stop_token_ids: tuple[int, ...] = (),
) -> list[int]:
    """Prefill and decode in one pool, alone in the batch."""
    assert sampling.max_tokens is not None
    pages = on.take(len(prompt) + sampling.max_tokens)
    task = PrefillTask("alone", tuple(prompt), pages, 0, sampling, stop_token_ids)
    first = run_prefill(on.prefill_engine(), task)["alone"]
    tokens = [first.token_id]
    if first.finish_reason is None:
        row = DecodeRow("alone", pages, first.token_id, tuple(prompt), sampling, stop_token_ids)
        tokens = run_decode(on.decode_engine(), row)["alone"]
    on.allocator.free(pages)
    return tokens


def random_prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 160, num_tokens).tolist())
