"""The deployments that benchmarks compare: a host on each of two cores, coupled or disaggregated.

They differ in roles and chunks only. Called by `interference` and `compare`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jpd.config import (
    CacheConfig,
    DeploymentConfig,
    EngineConfig,
    HostConfig,
    LaunchConfig,
    Role,
    RouterConfig,
    WorkerConfig,
)
from jpd.mesh_file import resolve_platform

DISAGGREGATED = "disaggregated"
CHUNKED = "colocated, chunked"
WHOLE = "colocated, whole prompts"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all of them share, in tokens but for slots and sequences."""

    max_model_len: int
    prompt_tokens: int  # the longest prompt; a chunk holds it where prompts are whole
    chunk: int
    page_size: int
    slots: int  # of each worker that decodes
    sequences: int  # of full length, for which each worker has pages
    context_buckets: tuple[int, ...]


def deployments(file: str, cores: Sequence[int], sizes: Sizes) -> dict[str, DeploymentConfig]:
    """By mode; each has a host on each of the two cores."""
    apart: tuple[Role, Role] = ("prefill", "decode")
    both: tuple[Role, Role] = ("colocated", "colocated")
    whole = -(-sizes.prompt_tokens // sizes.page_size) * sizes.page_size
    made: Mapping[str, tuple[tuple[Role, Role], int]] = {
        DISAGGREGATED: (apart, sizes.chunk),
        CHUNKED: (both, sizes.chunk),
        WHOLE: (both, whole),
    }
    return {
        mode: _deployment(file, cores, sizes, roles, chunk) for mode, (roles, chunk) in made.items()
    }


def whole_hosts(file: str, cores: Sequence[int], sizes: Sizes) -> DeploymentConfig:
    """A host on each core that prefills and decodes apart: where one is lost the other goes on."""
    hosts = tuple(HostConfig(f"core-{core}", "cpu", 2, cores=(core,)) for core in cores)
    roles: tuple[Role, Role] = ("prefill", "decode")
    workers = tuple(
        _worker(f"{role}-{index}", role, host.name, device, sizes)
        for index, host in enumerate(hosts)
        for device, role in enumerate(roles)
    )
    return _of_hosts(file, hosts, workers, sizes, sizes.chunk)


def _deployment(
    file: str, cores: Sequence[int], sizes: Sizes, roles: Sequence[Role], chunk: int
) -> DeploymentConfig:
    hosts = tuple(HostConfig(f"core-{core}", "cpu", 1, cores=(core,)) for core in cores)
    workers = tuple(
        _worker(f"{role}-{index}", role, host.name, 0, sizes)
        for index, (role, host) in enumerate(zip(roles, hosts, strict=True))
    )
    return _of_hosts(file, hosts, workers, sizes, chunk)


def _worker(name: str, role: Role, host: str, device: int, sizes: Sizes) -> WorkerConfig:
    slots = 0 if role == "prefill" else sizes.slots
    return WorkerConfig(name, role, host, (device,), data=1, tensor=1, expert=1, slots=slots)


def _of_hosts(
    file: str,
    hosts: tuple[HostConfig, ...],
    workers: tuple[WorkerConfig, ...],
    sizes: Sizes,
    chunk: int,
) -> DeploymentConfig:
    pages = 1 + sizes.sequences * sizes.max_model_len // sizes.page_size
    deployment = DeploymentConfig(
        file=file,
        hosts=hosts,
        workers=workers,
        cache=CacheConfig(sizes.page_size, pages=pages, retain_seconds=0.0),
        engine=EngineConfig(
            max_model_len=sizes.max_model_len,
            prefill_chunk=chunk,
            prefill_buckets=(chunk,),
            context_buckets=sizes.context_buckets,
            max_steps_per_call=1,  # a token a step, or gaps would come in groups
        ),
        router=RouterConfig(),
        slos=(),
        launch=LaunchConfig("subprocess"),
    )
    return resolve_platform(deployment)
