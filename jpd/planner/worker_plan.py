"""What one worker's devices hold: weights, KV pool and the working memory of a step.

Pure arithmetic over the parameter list of the model and the sharding rules. Knows nothing of other
workers. Called by `jpd.planner.deployment_plan`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jpd.cache.kv_cache import POOL_AXES, KVSpec
from jpd.config import CacheConfig, DeploymentConfig, HostConfig, WorkerConfig
from jpd.engine.buckets import CHUNK_ROWS
from jpd.errors import Problem
from jpd.kernels.backends import resolve
from jpd.kernels.batch_attention import pages_per_block
from jpd.nn.config import DecoderConfig
from jpd.nn.params import ParamSpec
from jpd.parallel.mesh import worker_mesh_shape
from jpd.parallel.sharding import UnevenAxis, bytes_per_device, num_parts, uneven_axes

GIB = 1 << 30
SCORE_BYTES = 4
NUM_SCORE_COPIES = 2  # the scores, and the weights made from them


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Per device, in bytes, unless named otherwise."""

    worker: WorkerConfig
    mesh_shape: Mapping[str, int]
    kv_partitions: int
    weight_bytes: int
    page_bytes: int
    num_pages: int  # of the pool, the bin page included
    page_size: int
    workspace_bytes: (
        int  # estimate: attention scores, gathered KV and activations of the largest step
    )
    memory_bytes: int | None  # of the device; None: unknown
    max_model_len: int

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.pool_bytes + self.workspace_bytes

    @property
    def num_pool_tokens(self) -> int:
        """What the pool holds of all sequences together."""
        return max(0, self.num_pages - 1) * self.page_size

    @property
    def largest_sequence_tokens(self) -> int:
        return min(self.max_model_len, self.num_pool_tokens)

    @property
    def largest_sequence_bytes(self) -> int:
        return -(-self.largest_sequence_tokens // self.page_size) * self.page_bytes


def plan_worker(
    worker: WorkerConfig,
    deployment: DeploymentConfig,
    config: DecoderConfig,
    specs: Sequence[ParamSpec],
    max_model_len: int,
) -> WorkerPlan:
    """The plan of one worker whose mesh divides the model; see `memory_problems` for the rest."""
    shape = worker_mesh_shape(
        tensor=worker.tensor, expert=worker.expert, num_cached_heads=config.num_cached_heads
    )
    weights = sum(
        bytes_per_device(spec.axes, spec.shape, spec.dtype.itemsize, shape) for spec in specs
    )
    cache, host = deployment.cache_of(worker), deployment.host(worker.host)
    page = KVSpec(
        config.num_layers, 1, cache.page_size, config.num_cached_heads, config.kv_width, cache.dtype
    )
    partitions = num_parts(POOL_AXES, page.layer_shape, shape)
    page_bytes = page.page_bytes // partitions
    memory = None if host.device_memory_gib is None else int(host.device_memory_gib * GIB)
    return WorkerPlan(
        worker=worker,
        mesh_shape=shape,
        kv_partitions=partitions,
        weight_bytes=weights,
        page_bytes=page_bytes,
        num_pages=_num_pages(cache, memory, weights, page_bytes),
        page_size=cache.page_size,
        workspace_bytes=_workspace_bytes(worker, deployment, config, shape, max_model_len),
        memory_bytes=memory,
        max_model_len=max_model_len,
    )


def _num_pages(cache: CacheConfig, memory: int | None, weights: int, page_bytes: int) -> int:
    """The pages asked for, or as the launcher does it: what memory_fraction leaves."""
    if cache.pages is not None or memory is None:
        return cache.pages or 0
    return max(0, int(memory * cache.memory_fraction) - weights) // page_bytes


def _workspace_bytes(
    worker: WorkerConfig,
    deployment: DeploymentConfig,
    config: DecoderConfig,
    shape: Mapping[str, int],
    max_model_len: int,
) -> int:
    """What the largest step needs at a time on a device: that of one layer."""
    itemsize = jnp.dtype(deployment.engine.dtype).itemsize
    chunk = min(deployment.engine.prefill_chunk, max_model_len)
    heads = -(-config.num_heads // (shape["tensor"] * shape["replica"]))
    kv_numbers = config.num_cached_heads // shape["tensor"] * config.kv_width

    def keys_at_once(rows: int, queries: int) -> int:
        if rows == 0 or resolve(deployment.engine.attention) != "blocks":
            return max_model_len
        cached, page_size = config.num_cached_heads, deployment.cache_of(worker).page_size
        shape = (rows, queries, cached, config.num_heads // cached, config.head_dim)
        pool = (1, page_size, cached, config.kv_width)
        num_pages = -(-max_model_len // page_size)
        return page_size * pages_per_block(shape, num_pages, pool)

    def step(rows: int, queries: int) -> int:
        num_tokens, num_keys = rows * queries, keys_at_once(rows, queries)
        scores = num_tokens * heads * num_keys * SCORE_BYTES * NUM_SCORE_COPIES
        gathered = rows * num_keys * kv_numbers * itemsize
        activations = num_tokens * (4 * config.embed_dim + 3 * config.mlp_dim) * itemsize
        logits = rows * config.vocab_size * SCORE_BYTES
        return scores + gathered + activations + logits

    # A decode worker prefills too, when a suffix is short or a request is replayed.
    return max(step(CHUNK_ROWS, -(-chunk // CHUNK_ROWS)), step(worker.slots, 1))


def uneven_problems(
    worker: WorkerConfig, config: DecoderConfig, specs: Sequence[ParamSpec], file: str
) -> list[Problem]:
    """A problem for each model size that the worker's mesh does not divide."""
    shape = worker_mesh_shape(
        tensor=worker.tensor, expert=worker.expert, num_cached_heads=config.num_cached_heads
    )
    found: dict[tuple[str, int], UnevenAxis] = {}
    for spec in specs:
        for uneven in uneven_axes(spec.axes, spec.shape, shape):
            found.setdefault((uneven.axis, uneven.dim), uneven)
    return [_uneven_problem(worker, config, uneven, file) for uneven in found.values()]


def _uneven_problem(
    worker: WorkerConfig, config: DecoderConfig, uneven: UnevenAxis, file: str
) -> Problem:
    heads = f"num_heads = {config.num_heads} with num_kv_heads = {config.num_kv_heads}"
    named = {"group": heads, "heads": heads}.get(uneven.axis, f"{uneven.axis} = {uneven.dim}")
    axis = "expert" if uneven.axis == "experts" else "tensor"
    value = worker.expert if axis == "expert" else worker.tensor
    return Problem(file, f"worker.{worker.name}.mesh.{axis}", value, f"does not divide {named}")


def memory_problems(
    plan: WorkerPlan, host: HostConfig, cache: CacheConfig, file: str
) -> list[Problem]:
    """Whether weights, one sequence of full length and a step's working memory fit the device."""
    problems = []
    key = f"worker.{plan.worker.name}"
    needed = 1 + -(-plan.max_model_len // plan.page_size)
    if plan.memory_bytes is None and cache.pages is None:
        rule = "needed to size the KV pool, unless cache.pages says how many"
        return [Problem(file, f"host.{host.name}.device_memory_gib", None, rule)]
    if plan.num_pages < needed:
        where = "cache.pages" if cache.pages is not None else f"{key}: pages in device_memory_gib"
        rule = f"one sequence of engine.max_model_len = {plan.max_model_len} takes {needed} pages"
        if cache.pages is None:
            rule += (
                f"; {host.device_memory_gib:g} GiB x memory_fraction = {cache.memory_fraction:g}"
                f" hold {plan.weight_bytes / GIB:.2f} GiB of weights and no more pages than these"
            )
        problems.append(Problem(file, where, plan.num_pages, rule))
    if plan.memory_bytes is not None and plan.total_bytes > plan.memory_bytes:
        parts = (
            f"weights {plan.weight_bytes / GIB:.2f} + KV pool {plan.pool_bytes / GIB:.2f}"
            f" + one step about {plan.workspace_bytes / GIB:.2f} GiB do not fit"
            f" {host.device_memory_gib:g} GiB: lower prefill_chunk, max_model_len, slots or pages"
        )
        problems.append(Problem(file, f"{key}: bytes per device", plan.total_bytes, parts))
    return problems
