"""The devices that a mesh file speaks of, and how much of their memory is there for KV pages."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jpd.cache.kv_cache import POOL_AXES, KVSpec
from jpd.config import CacheConfig, DeploymentConfig, HostConfig, WorkerConfig
from jpd.errors import ConfigError, Problem
from jpd.parallel.mesh import worker_mesh_shape
from jpd.parallel.platform import ensure_cpu_devices
from jpd.parallel.sharding import bytes_per_device


def only_host(deployment: DeploymentConfig) -> HostConfig:
    """The one host of a mesh file. Raises ConfigError when it has several."""
    if len(deployment.hosts) == 1:
        return deployment.hosts[0]
    names = [host.name for host in deployment.hosts]
    rule = "one process has the workers of one host: [launch] kind = subprocess"
    raise ConfigError([Problem(deployment.file, "host", names, rule)])


def host_devices(host: HostConfig, file: str) -> list[jax.Device]:
    """The host's devices in order. On cpu they are made, which must be before JAX is first used."""
    if host.platform == "cpu":
        ensure_cpu_devices(host.devices)
    try:
        devices = jax.devices(host.platform)
    except RuntimeError as error:
        rule = f"JAX finds no {host.platform} here: {error}"
        raise ConfigError([Problem(file, f"host.{host.name}.platform", host.platform, rule)]) from (
            error
        )
    if len(devices) < host.devices:
        rule = f"JAX finds {len(devices)} {host.platform} devices here"
        raise ConfigError([Problem(file, f"host.{host.name}.devices", host.devices, rule)])
    return devices[: host.devices]


def num_pool_pages(
    worker: WorkerConfig,
    page: KVSpec,
    cache: CacheConfig,
    devices: Sequence[jax.Device],
    file: str,
) -> int:
    """Pages of a worker's pool, the bin page included: as asked for, or what memory is left for.

    `page` describes a pool of one page. Called when the weights are on the devices already.
    """
    if cache.pages is not None:
        return cache.pages
    key = f"worker.{worker.name}: cache.memory_fraction"
    shape = worker_mesh_shape(
        tensor=worker.tensor, expert=worker.expert, num_cached_heads=page.num_cached_heads
    )
    itemsize = jnp.dtype(page.dtype).itemsize
    page_bytes = page.num_layers * bytes_per_device(POOL_AXES, page.layer_shape, itemsize, shape)
    free_bytes = min(_free_bytes(device, cache, file) for device in devices)
    num_pages = free_bytes // page_bytes
    if num_pages < 2:
        rule = f"leaves {free_bytes} bytes a device for KV pages of {page_bytes} bytes"
        raise ConfigError([Problem(file, key, cache.memory_fraction, rule)])
    return num_pages


def _free_bytes(device: jax.Device, cache: CacheConfig, file: str) -> int:
    """What memory_fraction of the device's memory leaves beside what is in use."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        rule = f"needed: device {device} does not say how much memory it has"
        raise ConfigError([Problem(file, "cache.pages", None, rule)])
    return int(stats["bytes_limit"] * cache.memory_fraction) - int(stats["bytes_in_use"])
