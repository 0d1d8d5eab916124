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
    here = sorted(os.sched_getaffinity(0))
    missing = [core for core in cores if core not in here]
    if missing:
        rule = f"cores {missing} are not there: this process may use {here}"
        raise ConfigError([Problem(file, f"host.{host}.cores", list(cores), rule)])
    for thread in THREADS.iterdir() if cores else ():
        os.sched_setaffinity(int(thread.name), cores)


def device_environment(host: HostConfig) -> dict[str, str]:
    """What the process of a host must find in its environment to see its devices, and no others."""
    if host.platform == "cpu":
        return {"JAX_PLATFORMS": "cpu"}
    if not host.accelerators:
        return {}
    return {VISIBLE[host.platform]: ",".join(str(number) for number in host.accelerators)}
