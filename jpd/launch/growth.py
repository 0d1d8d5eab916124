"""A deployment that grows by a host while it serves. Pure: knows no processes.

Executables of the running workers are made for certain ways of KV, so a new worker must be like one
that is there: the same mesh and page size, and no role that none of those has.
"""

from collections.abc import Iterable
from dataclasses import replace

from jpd.config import DeploymentConfig, WorkerConfig
from jpd.errors import RequestError


def grown(running: DeploymentConfig, file: DeploymentConfig, host: str) -> DeploymentConfig:
    """The running deployment and one more host of the mesh file as it is now. Raises RequestError.

    All else in the file is left alone until the next start.
    """
    if any(known.name == host for known in running.hosts):
        raise RequestError("host", host, "is running already")
    added = [config for config in file.hosts if config.name == host]
    if not added:
        known_names = ", ".join(config.name for config in file.hosts)
        raise RequestError("host", host, f"is not in {file.file}, which has {known_names}")
    workers = file.workers_of(host)
    names = {worker.name for worker in running.workers}
    for worker in workers:
        if worker.name in names:
            raise RequestError("host", host, f"a worker named {worker.name} is running already")
        if not like(worker, running.workers):
            rule = (
                f"{worker.name} has another mesh, page size or role than every running worker: "
                "their executables do not know it"
            )
            raise RequestError("host", host, rule)
    if not workers:
        raise RequestError("host", host, f"has no worker in {file.file}")
    return replace(running, hosts=(*running.hosts, *added), workers=(*running.workers, *workers))


def like(worker: WorkerConfig, others: Iterable[WorkerConfig]) -> str:
    """A worker among the others whose KV travels as this one's; "" when there is none."""
    for other in others:
        if _kind(other) == _kind(worker) and other.name != worker.name:
            return other.name
    return ""


def _kind(worker: WorkerConfig) -> tuple[object, ...]:
    """What the way of KV from and to a worker depends on."""
    sizes = (worker.tensor, worker.expert, worker.page_size)
    return (*sizes, worker.can_prefill, worker.can_decode)
