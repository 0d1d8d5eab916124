"""How fast each worker should be, by arithmetic alone: what the router assumes until it measures.

A prompt token costs two operations for each parameter that it uses; a decode step reads the weights
once, and the KV of every row. Peaks are those of `[[host]]`, or of a typical device of its
platform; what is reached of them is a guess that the first measurements correct. Called by the API.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jpd.config import HostConfig, Platform
from jpd.planner.deployment_plan import DeploymentPlan
from jpd.planner.worker_plan import WorkerPlan
from jpd.router.rates import Line, RateSeed
from jpd.transfer.plan import kv_bytes_per_token

COMPUTE_SHARE, MEMORY_SHARE, LINK_SHARE = 0.5, 0.5, 0.5
"""Of the peaks, to be expected."""
CALL_SECONDS = 0.002
"""Host and launch of one call, whatever it computes."""
TYPICAL_CONTEXT = 1024
"""Tokens of KV that a row of a decode step reads."""
NETWORK_BYTES_PER_SECOND = 10e9


@dataclass(frozen=True, slots=True)
class Peaks:
    """Of one device."""

    flops: float
    bytes_per_second: float
    link_bytes_per_second: float  # to a device of the same host


TYPICAL: Mapping[Platform, Peaks] = {
    "cpu": Peaks(50e9, 10e9, 5e9),
    "gpu": Peaks(600e12, 2e12, 100e9),
    "tpu": Peaks(200e12, 800e9, 50e9),
}


def peaks_of(host: HostConfig) -> Peaks:
    typical = TYPICAL[host.platform]
    return Peaks(
        typical.flops if host.device_tflops is None else host.device_tflops * 1e12,
        typical.bytes_per_second if host.device_gbps is None else host.device_gbps * 1e9,
        typical.link_bytes_per_second,
    )


def seed_rates(plan: DeploymentPlan) -> dict[str, RateSeed]:
    """What to assume of each worker, by name."""
    itemsize = jnp.dtype(plan.deployment.cache.dtype).itemsize
    token_bytes = kv_bytes_per_token(plan.config, itemsize)
    is_one_host = len(plan.deployment.hosts) == 1
    return {
        worker.worker.name: _seed(
            worker,
            peaks_of(plan.deployment.host(worker.worker.host)),
            plan.num_active_params,
            token_bytes,
            is_one_host,
        )
        for worker in plan.workers
    }


def _seed(
    plan: WorkerPlan, peaks: Peaks, num_active_params: int, token_bytes: int, is_one_host: bool
) -> RateSeed:
    num_devices = len(plan.worker.devices)
    flops = peaks.flops * COMPUTE_SHARE * num_devices
    memory = peaks.bytes_per_second * MEMORY_SHARE  # of a device: weight_bytes are a device's too
    link = peaks.link_bytes_per_second * num_devices if is_one_host else NETWORK_BYTES_PER_SECOND
    weights_seconds = CALL_SECONDS + plan.weight_bytes / memory
    row_seconds = TYPICAL_CONTEXT * token_bytes / (memory * num_devices)
    return RateSeed(
        prefill=Line(weights_seconds, 2.0 * num_active_params / flops),
        step=Line(weights_seconds, row_seconds + 2.0 * num_active_params / flops),
        link=Line(CALL_SECONDS, 1.0 / (link * LINK_SHARE)),
        kv_bytes_per_token=float(token_bytes),
    )
