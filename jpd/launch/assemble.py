"""Puts one worker together: pool, compiled functions, engines, tables, thread and client.

Knows the whole fleet only as far as who sends KV to whom, in how many parts. Called by launchers.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from jpd.cache.kv_cache import KVCache, KVSpec
from jpd.cache.page_allocator import PageAllocator
from jpd.cache.prefix_cache import PrefixCache
from jpd.config import DeploymentConfig, WorkerConfig
from jpd.engine.buckets import ShapeBuckets
from jpd.engine.compile_counter import CompileCounter
from jpd.engine.decode import DecodeEngine
from jpd.engine.functions import ModelFunctions
from jpd.engine.page_outlet import PageOutlet
from jpd.engine.prefill import PrefillEngine
from jpd.guidance.compiler import GrammarCompiler
from jpd.kernels.backends import AttentionName, resolve
from jpd.launch.devices import num_pool_pages
from jpd.launch.fleet import Member
from jpd.nn.config import DecoderConfig
from jpd.parallel.mesh import worker_mesh_shape
from jpd.transfer.plan import KVLayout, plan_transfer, wire_bytes_per_token
from jpd.transfer.protocol import KVTransfer
from jpd.transfer.wire import Wire
from jpd.worker.client import InProcessClient
from jpd.worker.decode_attempts import DecodeAttempts
from jpd.worker.page_pool import PagePool
from jpd.worker.parts import WorkerParts
from jpd.worker.prefill_attempts import PieceSender, PrefillAttempts
from jpd.worker.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a worker lives: its table in the mesh file, its mesh and its weights there."""

    config: WorkerConfig
    mesh: Mesh
    leaves: tuple[jax.Array, ...]

    @property
    def name(self) -> str:
        return self.config.name


@dataclass(frozen=True, slots=True)
class Assembly:
    """What the workers of one process share; `sites` are those, the deployment names all."""

    model: DecoderConfig
    deployment: DeploymentConfig
    buckets: ShapeBuckets
    max_model_len: int
    sites: Sequence[Site]
    transfer: KVTransfer
    counter: CompileCounter
    can_prefill_locally: bool
    grammars: GrammarCompiler | None  # None: the model has no tokenizer

    @property
    def attention(self) -> AttentionName:
        """How every worker computes it."""
        return resolve(self.deployment.engine.attention)

    def buckets_of(self, worker: WorkerConfig) -> ShapeBuckets:
        """Only a worker that sends KV away runs its chunks in layer groups."""
        engine, cache = self.deployment.engine, self.deployment.cache_of(worker)
        if not self._targets_of(worker):
            engine = replace(engine, layer_groups=1)
        return ShapeBuckets.from_config(engine, cache, self.max_model_len, self.model.layers)

    def _targets_of(self, source: WorkerConfig) -> list[WorkerConfig]:
        """Other workers that decode what this one prefills; []: it never sends."""
        others = [other for other in self.deployment.workers if other.name != source.name]
        return [other for other in others if source.can_prefill and other.can_decode]

    def wires_from(self, source: WorkerConfig) -> dict[str, Wire]:
        """How KV travels to each other worker that decodes; {}: this one never sends."""
        groups = self.deployment.engine.layer_groups
        return {other.name: self._wire(source, other, groups) for other in self._targets_of(source)}

    def wires_back_from(self, source: WorkerConfig) -> dict[str, Wire]:
        """How KV goes back to each worker that prefills for this one; {}: it never does.

        All layers together: nothing is computed meanwhile.
        """
        if not source.can_decode or self.deployment.router.send_back == "never":
            return {}
        others = (other for other in self.deployment.workers if other.name != source.name)
        return {other.name: self._wire(source, other, 1) for other in others if other.can_prefill}

    def wires_back_to(self, target: WorkerConfig) -> list[Wire]:
        """How KV comes back from workers that decode."""
        wires = (self.wires_back_from(other) for other in self.deployment.workers)
        return [found[target.name] for found in wires if target.name in found]

    def wires_to(self, target: WorkerConfig) -> list[Wire]:
        """How KV arrives from other workers that prefill."""
        wires = (self.wires_from(other) for other in self.deployment.workers)
        return [found[target.name] for found in wires if target.name in found]

    def _wire(self, source: WorkerConfig, target: WorkerConfig, layer_groups: int) -> Wire:
        cache, buckets = self.deployment.cache, self.buckets_of(target)
        token_bytes = wire_bytes_per_token(self.model, cache.wire_dtype)
        plan = plan_transfer(self._layout(source), self._layout(target), token_bytes)
        return plan.wire(
            buckets.page_size,
            buckets.page_moves,
            cache.wire_dtype,
            cache.checksum,
            layer_groups,
        )

    def _layout(self, worker: WorkerConfig) -> KVLayout:
        """As its mesh has it, which may be another process's."""
        shape = worker_mesh_shape(
            tensor=worker.tensor,
            expert=worker.expert,
            num_cached_heads=self.model.num_cached_heads,
        )
        return KVLayout(shape["tensor"], len(worker.devices))

    def num_compilations(self, site: Site) -> int:
        """Compilations since ready. They are the process's, so only one worker tells of them."""
        return self.counter.num_after_ready if site is self.sites[0] else 0

    def prefills(self, site: Site) -> bool:
        """Whether this worker gets prefill functions, for others or only for itself."""
        is_alone = not any(other.role == "prefill" for other in self.deployment.workers)
        wants_local = self.can_prefill_locally or self.deployment.router.local_prefill_tokens > 0
        return site.config.can_prefill or is_alone or wants_local


def assemble_worker(assembly: Assembly, site: Site) -> Member:
    """One worker, not started yet, known to the transfer. Takes the memory of its KV pool."""
    cache = KVCache(_pool_spec(assembly, site), site.mesh)
    functions = ModelFunctions(
        assembly.model,
        assembly.deployment.engine.dtype,
        site.mesh,
        cache.spec,
        assembly.buckets_of(site.config),
        site.config.slots,
        assembly.attention,
    )
    engines = _make_engines(assembly, site, functions, cache)
    parts = _make_parts(assembly, site, engines, _page_pool(cache.spec, assembly.deployment))
    worker = Worker(site.name, site.config.role, parts)
    assembly.transfer.register(site.name, site.mesh, worker.deliver, worker.serve)
    return Member(
        worker,
        InProcessClient(worker, assembly.grammars),
        lambda token_ids: functions.logits(site.leaves, token_ids),
    )


def _pool_spec(assembly: Assembly, site: Site) -> KVSpec:
    model, cache = assembly.model, assembly.deployment.cache_of(site.config)
    page = KVSpec(
        num_layers=model.num_layers,
        num_pages=1,
        page_size=cache.page_size,
        num_cached_heads=model.num_cached_heads,
        kv_width=model.kv_width,
        dtype=cache.dtype,
        kv_parts=model.kv_parts,
    )
    devices = list(site.mesh.devices.flat)
    num_pages = num_pool_pages(site.config, page, cache, devices, assembly.deployment.file)
    return replace(page, num_pages=num_pages)


def _page_pool(spec: KVSpec, deployment: DeploymentConfig) -> PagePool:
    retain_seconds = deployment.cache.retain_seconds
    allocator = PageAllocator(spec.num_pages)
    prefix_cache = PrefixCache(allocator, spec.page_size, retain_seconds)
    return PagePool(
        allocator, prefix_cache, page_size=spec.page_size, retain_seconds=retain_seconds
    )


@dataclass(frozen=True, slots=True)
class _Engines:
    prefill: PrefillEngine | None
    decode: DecodeEngine | None
    sender: PieceSender
    outlet: PageOutlet | None  # of what the decode engine's worker sends back

    def warm_up(self, after_each: Callable[[], None]) -> None:
        """Compile everything. On the worker's thread."""
        for engine in (self.prefill, self.decode):
            if engine is not None:
                engine.warm_up(after_each)
        if self.outlet is not None:
            self.outlet.warm_up()


def _make_engines(
    assembly: Assembly, site: Site, functions: ModelFunctions, cache: KVCache
) -> _Engines:
    sender = PieceSender(assembly.transfer)
    prefill = decode = outlet = None
    if assembly.prefills(site):
        wires = assembly.wires_from(site.config)
        for target, wire in wires.items():
            logger.info("KV %s -> %s: %s", site.name, target, wire)
        wires_back = assembly.wires_back_to(site.config)
        prefill = PrefillEngine(functions, cache, site.leaves, sender.send, wires, wires_back)
    if site.config.can_decode:
        wires_to = assembly.wires_to(site.config)
        decode = DecodeEngine(functions, cache, site.leaves, site.config.slots, wires_to)
        back = assembly.wires_back_from(site.config)
        outlet = PageOutlet(functions.moves, cache, assembly.transfer.offer, back)
    return _Engines(prefill, decode, sender, outlet)


def _make_parts(assembly: Assembly, site: Site, engines: _Engines, pool: PagePool) -> WorkerParts:
    decode = prefill = None
    timeout_seconds = assembly.deployment.router.transfer_timeout_seconds
    if engines.decode is not None:
        decode = DecodeAttempts(
            site.name,
            engines.decode,
            pool,
            num_slots=site.config.slots,
            max_model_len=assembly.max_model_len,
            reserve_tokens=assembly.deployment.cache.reserve_tokens,
            transfer_timeout_seconds=timeout_seconds,
            outlet=engines.outlet,
            grammars=assembly.grammars,
        )
    if engines.prefill is not None:
        prefill = PrefillAttempts(
            site.name,
            engines.prefill,
            pool,
            engines.sender,
            max_model_len=assembly.max_model_len,
            transfer_timeout_seconds=timeout_seconds,
            on_local_done=None if decode is None else decode.complete,
        )
    return WorkerParts(
        pool=pool,
        prefill=prefill,
        decode=decode,
        destinations=frozenset(assembly.wires_from(site.config)),
        transfer=assembly.transfer,
        warm_up=engines.warm_up,
        num_compilations=lambda: assembly.num_compilations(site),
    )
