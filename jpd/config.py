"""The deployment: what a mesh file says, frozen and checked once at the border.

Made by `jpd.mesh_file`. Knows no model: see `jpd.planner` for the pair.
"""

from dataclasses import dataclass, field
from typing import Literal

Platform = Literal["cpu", "gpu", "tpu"]
Role = Literal["prefill", "decode", "colocated"]
PrefillLostPolicy = Literal["retry_other_prefill", "fail"]
TransferFailedPolicy = Literal["retry", "fail"]
DecodeLostPolicy = Literal["replay", "fail"]


@dataclass(frozen=True, slots=True)
class HostConfig:
    """One process that owns devices."""

    name: str
    platform: Platform
    devices: int  # must be present; on cpu: virtual devices to create
    device_memory_gib: float | None = (
        None  # what `jpd check` plans with, unless cache.pages is given
    )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One mesh on one host with a role: one replica of a [[worker]], named `prefill-0`, ..."""

    name: str
    role: Role
    host: str
    devices: tuple[int, ...]  # indices into the host's devices
    data: int  # always 1: use replicas
    tensor: int
    expert: int
    slots: int  # rows of the decode batch; 0 on a prefill worker


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_size: int = 32  # tokens
    dtype: str = "auto"  # storage; auto: as engine.dtype
    pages: int | None = None  # per worker; None: by memory_fraction
    memory_fraction: float = 0.9  # of a device's memory for weights + KV pool
    retain_seconds: float = 600.0  # how long an unused prefix may stay


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Shapes and dtypes the engines are compiled for. Token counts."""

    max_model_len: int | None = None  # cap of prompt + output; None: the model's own limit
    prefill_chunk: int = 512  # a multiple of page_size
    prefill_buckets: tuple[int, ...] = ()  # padded chunk lengths; (): chunk, /4, /16, at least 16
    context_buckets: tuple[
        int, ...
    ] = ()  # padded KV lengths; (): max_model_len, /4, /16, at least a chunk
    dtype: str = "auto"  # weights, activations; auto: float32 on cpu, bfloat16 elsewhere
    max_steps_per_call: int = 4  # decode steps in one call while nobody waits; 1: never several

    def served_len(self, model_max_len: int) -> int:
        """The longest sequence served of a model with this limit of its own."""
        return min(self.max_model_len or model_max_len, model_max_len)


@dataclass(frozen=True, slots=True)
class FailureConfig:
    """The failure table: one visible policy per fault."""

    prefill_lost: PrefillLostPolicy = "retry_other_prefill"
    transfer_failed: TransferFailedPolicy = "retry"
    decode_lost: DecodeLostPolicy = "replay"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    local_prefill_tokens: int = (
        0  # uncached suffix up to this: prefill on the decode worker; 0: never
    )
    max_waiting: int = 1024  # requests waiting for room; one more is refused with 429
    request_timeout_seconds: float = 600.0
    transfer_timeout_seconds: float = 30.0
    session_ttl_seconds: float = 600.0
    failure: FailureConfig = field(default_factory=FailureConfig)


@dataclass(frozen=True, slots=True)
class SloConfig:
    name: str
    ttft_ms: float
    tpot_ms: float
    priority: int = 0


@dataclass(frozen=True, slots=True)
class DeploymentConfig:
    """A whole mesh file."""

    file: str
    hosts: tuple[HostConfig, ...]
    workers: tuple[WorkerConfig, ...]
    cache: CacheConfig
    engine: EngineConfig
    router: RouterConfig
    slos: tuple[SloConfig, ...]

    def host(self, name: str) -> HostConfig:
        return next(host for host in self.hosts if host.name == name)
