"""The deployment: what a mesh file says, frozen and checked once at the border.

Made by `jpd.mesh_file`. Knows no model: see `jpd.planner` for the pair.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

Platform = Literal["cpu", "gpu", "tpu"]
LaunchKind = Literal["inprocess", "subprocess", "ray"]
Placement = Literal["spread", "pack"]
AttentionChoice = Literal["auto", "reference", "blocks", "cudnn", "tpu_ragged"]
Role = Literal["prefill", "decode", "colocated"]
KVTransport = Literal["host_staged", "jax_transfer"]
SendBackPolicy = Literal["cost", "always", "never"]
PrefillLostPolicy = Literal["retry_other_prefill", "fail"]
TransferFailedPolicy = Literal["retry", "fail"]
DecodeLostPolicy = Literal["replay", "fail"]
LatePolicy = Literal["shed", "serve"]
PolicyName = Literal[
    "cost",
    "round_robin",
    "least_load",
    "power_of_two",
    "least_kv",
    "least_requests",
    "prefix_affinity",
    "session_affinity",
    "length_aware",
]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HostConfig:
    """One process that owns devices."""

    name: str
    platform: Platform
    devices: int  # must be present; on cpu: virtual devices to create
    device_memory_gib: float | None = (
        None  # what `jpd check` plans with, unless cache.pages is given
    )
    device_tflops: float | None = None  # peak of a device; None: a typical one of the platform
    device_gbps: float | None = None  # peak of its memory, gigabytes a second
    cores: tuple[int, ...] = ()  # cpu: the process runs on these alone; (): on all
    accelerators: tuple[int, ...] = ()  # which of the machine's; (): all that the process sees
    address: str = LOOPBACK  # where the host listens; other hosts and the router reach it there


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
    slots: int  # rows of the decode batch; 0 on a worker that never decodes
    roles: tuple[Role, ...] = ()  # others that it can take at run time: it is compiled for them too
    page_size: int | None = None  # of one that never decodes; None: cache.page_size

    @property
    def can_prefill(self) -> bool:
        """For others, now or in another of its roles."""
        return any(role != "decode" for role in (self.role, *self.roles))

    @property
    def can_decode(self) -> bool:
        """Now or in another of its roles."""
        return any(role != "prefill" for role in (self.role, *self.roles))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_size: int = 32  # tokens
    dtype: str = "auto"  # storage; auto: as engine.dtype
    pages: int | None = None  # per worker; None: by memory_fraction
    memory_fraction: float = 0.9  # of a device's memory for weights + KV pool
    retain_seconds: float = 600.0  # how long an unused prefix may stay
    wire_dtype: str = "auto"  # of pages on their way; auto: as stored; int8: quantised
    checksum: bool = False  # compare every piece that arrives with what was sent
    transport: KVTransport = "host_staged"  # of pieces between hosts
    reserve_tokens: int = 256  # output tokens reserved with the prompt; more pages come as it grows


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
    layer_groups: int = 1  # calls of a prefill chunk; after each the pages of its layers leave
    max_speculative_tokens: int = 0  # drafts of a request that asks for them; 0: no executables
    max_steps_per_call: int | None = None  # while nobody waits; None: 1 on cpu, 4 elsewhere
    attention: AttentionChoice = "auto"  # see jpd.kernels.backends; auto: blocks

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
    policy: PolicyName = "cost"  # who gets a request: see jpd.router.policies
    local_prefill_tokens: int = (
        0  # uncached suffix up to this: prefill on the decode worker; 0: never
    )
    send_back: SendBackPolicy = "cost"  # KV that only a decode worker holds, to who prefills
    max_waiting: int = 1024  # requests waiting for room; one more is refused with 429
    request_timeout_seconds: float = 600.0
    transfer_timeout_seconds: float = 30.0
    session_ttl_seconds: float = 600.0
    prefix_index_pages: int = 4_000_000  # pages the router remembers, of all workers together
    failure: FailureConfig = field(default_factory=FailureConfig)


@dataclass(frozen=True, slots=True)
class SloConfig:
    """A class of requests: what it is promised, and what that is worth."""

    name: str
    ttft_ms: float
    tpot_ms: float
    priority: int = 0
    weight: float = 1.0  # share of the turns while several classes wait for room
    late: LatePolicy = "shed"  # who would miss the targets because of others: 429, or served late


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How hosts are started and kept running."""

    kind: LaunchKind = "inprocess"
    max_restarts: int = 10  # of a host that ended by itself; a minute of service forgives them
    start_timeout_seconds: float = 1800.0  # until a host has loaded and compiled everything
    ray_address: str | None = None  # None: this machine's cluster, started when there is none
    placement: Placement = "spread"  # ray: hosts on different nodes, or together where they fit


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """What hosts and router show to one another; PEM files, read by each host where it runs."""

    token_file: str | None = None  # None: a new token with every start
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    insecure: bool = False  # other addresses than loopback without certificates

    @property
    def has_certificates(self) -> bool:
        return self.ca_file is not None


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
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def workers_of(self, host: str) -> tuple[WorkerConfig, ...]:
        return tuple(worker for worker in self.workers if worker.host == host)

    def host(self, name: str) -> HostConfig:
        return next(host for host in self.hosts if host.name == name)

    def cache_of(self, worker: WorkerConfig) -> CacheConfig:
        """With the worker's own page size, and pages for as many tokens."""
        size, cache = worker.page_size or self.cache.page_size, self.cache
        pages = cache.pages and 1 + -(-(cache.pages - 1) * cache.page_size // size)
        return replace(cache, page_size=size, pages=pages)
