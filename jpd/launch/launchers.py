"""Picks the launcher that the mesh file names. Called by `jpd.api`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jpd.checkpoint.model_source import Model
from jpd.checkpoint.progress import ProgressCallback
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem
from jpd.guidance.compiler import GrammarCompiler
from jpd.launch.hosted import launch_hosts
from jpd.launch.inprocess import TransferWrapper, launch_workers
from jpd.launch.orders import HostLauncher
from jpd.launch.ray_cluster import RayCluster
from jpd.launch.ray_hosts import RayLauncher
from jpd.launch.subprocess_hosts import SubprocessLauncher
from jpd.worker.protocol import WorkerClient


class RunningFleet(Protocol):
    """Running workers, whichever launcher started them."""

    @property
    def clients(self) -> Sequence[WorkerClient]: ...

    @property
    def grammars(self) -> GrammarCompiler | None: ...

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]: ...

    def add_host(self, name: str) -> Sequence[WorkerClient]: ...

    def forget_worker(self, name: str) -> None: ...

    def close(self) -> None: ...


def launch_fleet(
    model: Model,
    deployment: DeploymentConfig,
    *,
    transfer_wrapper: TransferWrapper | None = None,
    progress: ProgressCallback | None = None,
    can_prefill_locally: bool = False,
) -> RunningFleet:
    """All workers of the deployment, ready. Blocks; raises ConfigError, WorkerError.

    `transfer_wrapper` is for the embedded launcher only.
    """
    kind = deployment.launch.kind
    if kind == "inprocess":
        return launch_workers(
            model,
            deployment,
            transfer_wrapper=transfer_wrapper,
            progress=progress,
            can_prefill_locally=can_prefill_locally,
        )
    if transfer_wrapper is not None:
        rule = "a transfer_wrapper needs the workers in this process"
        raise ConfigError([Problem(deployment.file, "launch.kind", kind, rule)])
    return launch_hosts(
        model,
        deployment,
        _host_launcher(deployment),
        progress=progress,
        can_prefill_locally=can_prefill_locally,
    )


def _host_launcher(deployment: DeploymentConfig) -> HostLauncher:
    """Raises ConfigError when there is no Ray, or no cluster where the file says."""
    if deployment.launch.kind == "ray":
        return RayLauncher(RayCluster(deployment.launch, deployment.file), deployment)
    return SubprocessLauncher()
