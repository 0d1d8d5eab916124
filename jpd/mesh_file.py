"""Reads mesh_configs/*.toml: `load_deployment(path)` gives a checked, frozen DeploymentConfig.

What is wrong in a file is reported at once: a ConfigError of Problems (file, key, value, rule).
Called by the command line and the Python API.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import cast, get_args

from jpd.config import (
    AttentionChoice,
    CacheConfig,
    DeploymentConfig,
    EngineConfig,
    HostConfig,
    KVTransport,
    Role,
    WorkerConfig,
)
from jpd.errors import ConfigError, Problem
from jpd.mesh_hosts import NAME, read_host, read_launch, read_security
from jpd.mesh_router import read_router, read_slo
from jpd.request import MAX_SPECULATIVE_TOKENS
from jpd.toml_reader import Table, read_toml

DTYPES = ("auto", "float32", "bfloat16")

ACCELERATOR_STEPS_PER_CALL = 4
"""On CPU a dispatch costs little beside a step, and every number of steps is compiled."""
MAX_PAGE_SIZE = 1024
MESH_AXES = ("data", "tensor", "expert")
DEFAULT_SLOTS = 16


def find_mesh_file(spec: str | Path) -> Path:
    """A path, or the bare name of a file in mesh_configs/, here or in the package."""
    path = Path(spec)
    package = Path(__file__).resolve().parent
    for folder in (Path("mesh_configs"), package / "mesh_configs", package.parent / "mesh_configs"):
        for name in (path.name, f"{path.name}.toml"):
            if not path.exists() and path.parent == Path(".") and (folder / name).is_file():
                return folder / name
    return path


def load_deployment(spec: str | Path) -> DeploymentConfig:
    """Read and check a mesh file; "auto" is resolved. Raises ConfigError with all problems."""
    path = find_mesh_file(spec)
    values = read_toml(path)
    problems: list[Problem] = []
    root = Table(str(path), "", values, problems)
    hosts = tuple(read_host(table) for table in root.tables("host"))
    tables = root.tables("worker")
    workers = tuple(worker for table in tables for worker in _read_worker(table, hosts))
    cache = _read_cache(root.table("cache"))
    engine = _read_engine(root.table("engine"), cache)
    router = read_router(root.table("router"))
    slos = tuple(read_slo(table) for table in root.tables("slo"))
    launch = read_launch(root.table("launch"), hosts)
    security = read_security(root.table("security"))
    root.close()
    config = DeploymentConfig(
        str(path), hosts, workers, cache, engine, router, slos, launch, security
    )
    _check_fleet(root, config)
    if problems:
        raise ConfigError(problems)
    return resolve_platform(config)


def resolve_platform(config: DeploymentConfig) -> DeploymentConfig:
    """Put the platforms' defaults where the file leaves the choice. Raises ConfigError when
    platforms disagree on a dtype."""
    config = _resolve_dtypes(config)
    if config.engine.max_steps_per_call is not None:
        return config
    is_cpu = any(host.platform == "cpu" for host in config.hosts)
    num_steps = 1 if is_cpu else ACCELERATOR_STEPS_PER_CALL
    return replace(config, engine=replace(config.engine, max_steps_per_call=num_steps))


def _resolve_dtypes(config: DeploymentConfig) -> DeploymentConfig:
    """Raises ConfigError when platforms disagree."""
    names = {"float32" if host.platform == "cpu" else "bfloat16" for host in config.hosts}
    fields = {"engine.dtype": config.engine.dtype, "cache.dtype": config.cache.dtype}
    if len(names) > 1 and "auto" in fields.values():
        rule = "hosts of several platforms: name the dtype"
        keys = [key for key, value in fields.items() if value == "auto"]
        raise ConfigError([Problem(config.file, key, "auto", rule) for key in keys])
    default = names.pop()
    engine = config.engine.dtype if config.engine.dtype != "auto" else default
    cache = config.cache.dtype if config.cache.dtype != "auto" else engine
    return replace(
        config,
        engine=replace(config.engine, dtype=engine),
        cache=replace(
            config.cache,
            dtype=cache,
            wire_dtype=cache if config.cache.wire_dtype == "auto" else config.cache.wire_dtype,
        ),
    )


def _read_worker(table: Table, hosts: Sequence[HostConfig]) -> list[WorkerConfig]:
    """One worker per replica: `devices = [0, 1]` is one, `devices = [[0, 1], [2, 3]]` are two."""
    table.required("name", "the worker's name")
    table.required("role", "prefill, decode or colocated")
    table.required("host", "the name of a [[host]]")
    name = table.text("name", "", NAME)
    role = cast(Role, table.choice("role", "colocated", Role))
    host = _read_host_name(table, hosts)
    roles = _read_roles(table)
    slots = _read_slots(table, {role, *roles})
    page_size = _read_page_size(table, {role, *roles})
    mesh = table.table("mesh")
    data, tensor, expert = (mesh.integer(axis, 1, low=1, high=4096) for axis in MESH_AXES)
    mesh.close()
    if data > 1:
        mesh.problem("data", data, "must be 1: write one device list per replica instead")
    replicas = _read_replicas(table)
    table.close()
    for devices in replicas:
        if len(devices) != tensor * expert and data == 1:
            rule = f"{len(devices)} devices, but mesh tensor = {tensor} x expert = {expert}"
            table.problem("devices", list(devices), f"{rule} needs {tensor * expert}")
    return [
        WorkerConfig(
            f"{name}-{index}", role, host, devices, 1, tensor, expert, slots, roles, page_size
        )
        for index, devices in enumerate(replicas)
    ]


def _read_host_name(table: Table, hosts: Sequence[HostConfig]) -> str:
    name = table.text("host", "")
    known = [host.name for host in hosts]
    if name and name not in known:
        table.problem("host", name, f"no such [[host]]; hosts are {', '.join(known) or 'none'}")
    return name


def _read_roles(table: Table) -> tuple[Role, ...]:
    value = table.value("roles")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(role in get_args(Role) for role in value):
        table.problem("roles", value, f"must be a list of {', '.join(get_args(Role))}")
        return ()
    return tuple(value)


def _read_slots(table: Table, roles: Collection[Role]) -> int:
    slots = table.integer("slots", DEFAULT_SLOTS, low=1, high=4096)
    if any(role != "prefill" for role in roles):
        return slots
    if "slots" in table:
        table.problem("slots", slots, "a prefill worker has no decode batch; leave it out")
    return 0


def _read_page_size(table: Table, roles: Collection[Role]) -> int | None:
    page_size = table.integer("page_size", None, low=1, high=MAX_PAGE_SIZE)
    if page_size is not None and set(roles) != {"prefill"}:
        rule = "only a prefill worker may have its own: workers that decode share cache.page_size"
        table.problem("page_size", page_size, rule)
    return page_size


def _read_replicas(table: Table) -> list[tuple[int, ...]]:
    """The device lists of a worker table; [] (and a problem) when they are wrong."""
    value = table.value("devices")
    rule = "must be a list of device numbers, or a list of such lists: one per replica"
    if value is None:
        table.required("devices", rule)
    if not isinstance(value, list) or not value:
        if value is not None:
            table.problem("devices", value, rule)
        return []
    lists = value if all(isinstance(item, list) for item in value) else [value]
    for item in lists:
        if not item or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in item):
            table.problem("devices", value, rule)
            return []
    return [tuple(item) for item in lists]


def _read_cache(table: Table) -> CacheConfig:
    default = CacheConfig()
    cache = CacheConfig(
        page_size=table.integer("page_size", default.page_size, low=1, high=MAX_PAGE_SIZE),
        dtype=table.choice("dtype", default.dtype, DTYPES),
        pages=table.integer("pages", None, low=2),
        memory_fraction=table.number(
            "memory_fraction", default.memory_fraction, low=0, high=1, above=True
        ),
        retain_seconds=table.number("retain_seconds", default.retain_seconds),
        wire_dtype=table.choice("wire_dtype", default.wire_dtype, (*DTYPES, "int8")),
        checksum=table.boolean("checksum", default.checksum),
        transport=cast(KVTransport, table.choice("transport", default.transport, KVTransport)),
        reserve_tokens=table.integer("reserve_tokens", default.reserve_tokens, low=1),
    )
    table.close()
    return cache


def _read_engine(table: Table, cache: CacheConfig) -> EngineConfig:
    default = EngineConfig()
    default_chunk = -(-default.prefill_chunk // cache.page_size) * cache.page_size
    engine = EngineConfig(
        max_model_len=table.integer("max_model_len", None, low=2),
        prefill_chunk=table.integer("prefill_chunk", default_chunk, low=1),
        prefill_buckets=table.integers("prefill_buckets", low=1),
        context_buckets=table.integers("context_buckets", low=1),
        dtype=table.choice("dtype", default.dtype, DTYPES),
        attention=cast(
            AttentionChoice, table.choice("attention", default.attention, AttentionChoice)
        ),
        layer_groups=table.integer("layer_groups", default.layer_groups, low=1),
        max_steps_per_call=table.integer(
            "max_steps_per_call", default.max_steps_per_call, low=1, high=64
        ),
        max_speculative_tokens=table.integer(
            "max_speculative_tokens",
            default.max_speculative_tokens,
            low=0,
            high=MAX_SPECULATIVE_TOKENS,
        ),
    )
    table.close()
    if engine.prefill_chunk % cache.page_size:
        rule = f"must be a multiple of cache.page_size = {cache.page_size}"
        table.problem("prefill_chunk", engine.prefill_chunk, rule)
    _check_buckets(table, engine, cache)
    return engine


def _check_buckets(table: Table, engine: EngineConfig, cache: CacheConfig) -> None:
    chunk = engine.prefill_chunk
    for name in ("prefill_buckets", "context_buckets"):
        buckets = getattr(engine, name)
        if list(buckets) != sorted(set(buckets)):
            table.problem(name, list(buckets), "must rise from one to the next")
    if engine.prefill_buckets and max(engine.prefill_buckets) != chunk:
        rule = f"the last one must be prefill_chunk = {chunk}"
        table.problem("prefill_buckets", list(engine.prefill_buckets), rule)
    context = engine.context_buckets
    if any(bucket % cache.page_size for bucket in context):
        rule = f"must be multiples of cache.page_size = {cache.page_size}"
        table.problem("context_buckets", list(context), rule)
    if context and engine.max_model_len is not None and max(context) < engine.max_model_len:
        rule = f"the last one must hold max_model_len = {engine.max_model_len}"
        table.problem("context_buckets", list(context), rule)


def _check_fleet(root: Table, config: DeploymentConfig) -> None:
    """What only shows when hosts and workers are seen together."""
    if not config.hosts:
        root.problem("host", None, "is missing: at least one [[host]]")
    for kind, names in (
        ("host", [host.name for host in config.hosts]),
        (
            "worker",
            [
                worker.name.rpartition("-")[0]
                for worker in config.workers
                if worker.name.endswith("-0")
            ],
        ),
        ("slo", [slo.name for slo in config.slos]),
    ):
        for name in (name for name, count in Counter(names).items() if count > 1 and name):
            root.problem(f"{kind}.name", name, f"must be unique among [[{kind}]]")
    for verb, role in (("prefill", "prefill"), ("decode", "decode")):
        if not any(worker.role in (role, "colocated") for worker in config.workers):
            rule = f"no worker can {verb}: add one with role {role} or colocated"
            root.problem("worker.role", sorted({w.role for w in config.workers}), rule)
    if config.engine.layer_groups > 1 and len(config.workers) == 1:
        rule = "must be 1 where no KV travels: there is only one worker"
        root.problem("engine.layer_groups", config.engine.layer_groups, rule)
    for worker in config.workers:
        if worker.page_size and config.engine.prefill_chunk % worker.page_size:
            rule = f"must divide engine.prefill_chunk = {config.engine.prefill_chunk}"
            root.problem(f"worker.{worker.name}.page_size", worker.page_size, rule)
    for host in (host for host in config.hosts if host.devices):
        _check_devices(root, host, [w for w in config.workers if w.host == host.name])


def _check_devices(root: Table, host: HostConfig, workers: Sequence[WorkerConfig]) -> None:
    owners: dict[int, str] = {}
    for worker in workers:
        key = f"worker.{worker.name}.devices"
        missing = [device for device in worker.devices if device >= host.devices]
        if missing:
            rule = f"host {host.name} has devices 0 to {host.devices - 1}"
            root.problem(key, list(worker.devices), rule)
        for device in worker.devices:
            owner = owners.setdefault(device, worker.name) if device not in missing else None
            if device in owners and (owner != worker.name or worker.devices.count(device) > 1):
                rule = f"device {device} of host {host.name} already belongs to {owner}"
                root.problem(key, list(worker.devices), rule)
                break


def with_overrides(
    deployment: DeploymentConfig, tables: Mapping[str, Mapping[str, object] | None]
) -> DeploymentConfig:
    """The deployment with keys of its tables replaced, for `launch`. Raises ConfigError for unknown
    keys."""
    problems = []
    changed: dict[str, object] = {}
    for name, values in tables.items():
        table = getattr(deployment, name)
        known = {field.name for field in fields(table)}
        for key, value in (values or {}).items():
            if key not in known:
                rule = f"is not a key of [{name}]"
                problems.append(Problem("launch()", f"{name}.{key}", value, rule))
        if values and not problems:
            changed[name] = replace(table, **values)
    if problems:
        raise ConfigError(problems)
    return resolve_platform(replace(deployment, **changed)) if changed else deployment  # type: ignore[arg-type]
