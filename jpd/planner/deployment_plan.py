"""A model on a mesh file: every problem of the pair, or the plan of workers and transfers.

1. `plan_deployment` asks per worker whether the sizes divide and whether memory holds.
2. Every prefill worker is paired with every decode worker: a transfer plan.
3. The buckets are those the engines will compile.
Called by the command line (`check`, and before `serve`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jpd.config import DeploymentConfig
from jpd.engine.buckets import ShapeBuckets
from jpd.errors import ConfigError, Problem
from jpd.kernels.backends import AttentionName, resolve
from jpd.nn.config import DecoderConfig
from jpd.nn.params import ParamSpec, abstract_params
from jpd.planner.attention_plan import attention_problems
from jpd.planner.worker_plan import WorkerPlan, memory_problems, plan_worker, uneven_problems
from jpd.transfer.plan import KVLayout, TransferPlan, plan_transfer, wire_bytes_per_token


@dataclass(frozen=True, slots=True)
class PairPlan:
    """How KV goes from these workers to those; all of one kind travel alike."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    same_host: bool
    plan: TransferPlan


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """A good pair."""

    deployment: DeploymentConfig
    config: DecoderConfig
    num_params: int
    num_active_params: int  # that one token meets: of experts those it is sent to
    max_model_len: int
    workers: tuple[WorkerPlan, ...]
    pairs: tuple[PairPlan, ...]
    buckets: ShapeBuckets
    attention: AttentionName


def plan_deployment(
    config: DecoderConfig, deployment: DeploymentConfig, *, sizes_memory: bool = True
) -> DeploymentPlan:
    """Plan the pair. Raises ConfigError with every problem found.

    `sizes_memory` False leaves out what can be asked of the devices themselves at launch.
    """
    problems: list[Problem] = []
    max_model_len = deployment.engine.served_len(config.max_len)
    params = abstract_params(config, deployment.engine.dtype)
    plans = []
    for worker in deployment.workers:
        uneven = uneven_problems(worker, config, params.specs, deployment.file)
        problems += uneven
        if not uneven:
            plans.append(plan_worker(worker, deployment, config, params.specs, max_model_len))
    if sizes_memory:
        problems += _memory_problems(plans, deployment)
    problems += attention_problems(config, deployment)
    buckets = _buckets(deployment, config, max_model_len, problems)
    if problems or buckets is None:
        raise ConfigError(problems)
    pairs = _pair_plans(plans, config, deployment)
    return DeploymentPlan(
        deployment,
        config,
        params.num_params,
        _num_active_params(config, params.specs),
        max_model_len,
        tuple(plans),
        pairs,
        buckets,
        resolve(deployment.engine.attention),
    )


def _num_active_params(config: DecoderConfig, specs: Sequence[ParamSpec]) -> int:
    moe = next((layer.moe for layer in config.layers if layer.moe is not None), None)
    share = 1.0 if moe is None else moe.num_experts_per_token / moe.num_experts
    return round(
        sum(math.prod(spec.shape) * (share if "experts" in spec.axes else 1.0) for spec in specs)
    )


def _memory_problems(plans: list[WorkerPlan], deployment: DeploymentConfig) -> list[Problem]:
    found = [
        problem
        for plan in plans
        for problem in memory_problems(
            plan,
            deployment.host(plan.worker.host),
            deployment.cache_of(plan.worker),
            deployment.file,
        )
    ]
    return list({(problem.key, str(problem)): problem for problem in found}.values())


def _buckets(
    deployment: DeploymentConfig,
    config: DecoderConfig,
    max_model_len: int,
    problems: list[Problem],
) -> ShapeBuckets | None:
    engine, cache = deployment.engine, deployment.cache
    try:
        return ShapeBuckets.from_config(engine, cache, max_model_len, config.layers)
    except ConfigError as error:
        problems += (replace(problem, file=deployment.file) for problem in error.problems)
        return None


def _pair_plans(
    plans: list[WorkerPlan], config: DecoderConfig, deployment: DeploymentConfig
) -> tuple[PairPlan, ...]:
    """One plan per kind of pair, so that forty equal replicas are one line of the report."""
    token_bytes = wire_bytes_per_token(config, deployment.cache.wire_dtype)
    kinds: dict[tuple[KVLayout, KVLayout, bool], list[tuple[str, str]]] = {}
    for source in (plan for plan in plans if plan.worker.role == "prefill"):
        for target in (plan for plan in plans if plan.worker.role == "decode"):
            same_host = source.worker.host == target.worker.host
            kind = (_layout(source), _layout(target), same_host)
            kinds.setdefault(kind, []).append((source.worker.name, target.worker.name))
    return tuple(
        PairPlan(
            sources=tuple(dict.fromkeys(source for source, _ in names)),
            targets=tuple(dict.fromkeys(target for _, target in names)),
            same_host=same_host,
            plan=plan_transfer(source_layout, target_layout, token_bytes),
        )
        for (source_layout, target_layout, same_host), names in kinds.items()
    )


def _layout(plan: WorkerPlan) -> KVLayout:
    return KVLayout(plan.kv_partitions, len(plan.worker.devices))
