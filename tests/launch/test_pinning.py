"""Cores and accelerators of a host process."""

import os
import subprocess
import sys

import pytest

from jpd.config import HostConfig
from jpd.errors import ConfigError
from jpd.launch.pinning import device_environment, pin_process

PINNED = """
import os, threading
from jpd.launch.pinning import pin_process
before = threading.Thread(target=threading.Event().wait, daemon=True)
before.start()
pin_process([{core}], "f.toml", "a")
found = []
after = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
after.start(); after.join()
print(found[0], os.sched_getaffinity(before.native_id), os.sched_getaffinity(0))
"""


def test_threads_of_before_and_after_run_on_the_cores() -> None:
    core = max(os.sched_getaffinity(0))
    code = PINNED.format(core=core)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == " ".join([str({core})] * 3)


def test_a_core_that_is_not_there_is_refused() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=r"f.toml: host.a.cores = \[4095\]"):
        pin_process([4095], "f.toml", "a")
    pin_process([], "f.toml", "a")
    assert os.sched_getaffinity(0) == before


def test_processes_see_their_own_accelerators() -> None:
    def seen(host: HostConfig) -> dict[str, str]:
        found = device_environment(host)
        return {name: value for name, value in found.items() if name != "GRPC_VERBOSITY"}

    assert seen(HostConfig("a", "cpu", 2, cores=(1,))) == {"JAX_PLATFORMS": "cpu"}
    assert seen(HostConfig("a", "gpu", 2)) == {}
    gpus = HostConfig("a", "gpu", 2, accelerators=(2, 3))
    assert seen(gpus) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    chips = HostConfig("a", "tpu", 1, accelerators=(3,))
    assert seen(chips) == {"TPU_VISIBLE_CHIPS": "3"}
