"""Keeps a host process to the cores and accelerators that the mesh file gives it."""

import os
from collections.abc import Sequence
from pathlib import Path

from jpd.config import HostConfig
from jpd.errors import ConfigError, Problem

THREADS = Path("/proc/self/task")

VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}


def pin_process(cores: Sequence[int], file: str, host: str) -> None:
    """Run on these cores alone: threads that exist already, and all that will be made.

    Must run before JAX is first used: it makes as many threads as it finds cores. Raises
    ConfigError when a core is not there.
    """
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)  # also beyond what whoever started us keeps to
        given = os.sched_getaffinity(0)
    except OSError:
        given = set()
    if given != set(cores):
        rule = f"the machine gives this process {sorted(given) or 'none'} of them"
        raise ConfigError([Problem(file, f"host.{host}.cores", list(cores), rule)])
    for thread in THREADS.iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def device_environment(host: HostConfig) -> dict[str, str]:
    """What the process of a host must find in its environment to see its devices, and no others."""
    quiet = {"GRPC_VERBOSITY": "ERROR"}  # a router that goes away is told in our own words
    if host.platform == "cpu":
        return {**quiet, "JAX_PLATFORMS": "cpu"}
    if not host.accelerators:
        return quiet
    return {**quiet, VISIBLE[host.platform]: ",".join(str(number) for number in host.accelerators)}
