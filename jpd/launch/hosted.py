"""A fleet whose workers live in other processes: from model and mesh file to clients of them.

The same face as the embedded fleet. Starts no JAX in this process. Called by `jpd.api`.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace

import grpc
import numpy as np
import numpy.typing as npt

from jpd.checkpoint.model_source import Model
from jpd.checkpoint.progress import ProgressCallback
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, WorkerLostError
from jpd.guidance.compiler import GrammarCompiler
from jpd.launch.growth import grown
from jpd.launch.inprocess import grammar_compiler
from jpd.launch.orders import (
    HostLauncher,
    HostOrders,
    address_problem,
    read_security,
    read_token,
)
from jpd.launch.supervisor import HostSupervisor
from jpd.mesh_file import load_deployment
from jpd.rpc import worker_pb2 as pb
from jpd.rpc.failures import load_error
from jpd.rpc.security import Security, open_blocking_channel
from jpd.rpc.worker_pb2_grpc import WorkerHostStub
from jpd.worker.connection import HostConnection
from jpd.worker.fingerprint import fingerprint_of
from jpd.worker.remote import RemoteClient

LOGITS_SECONDS = 600.0


class HostedFleet:
    """Running hosts and the clients of all their workers."""

    def __init__(
        self,
        model: Model,
        deployment: DeploymentConfig,
        supervisor: HostSupervisor,
        security: Security,
        grammars: GrammarCompiler | None,
    ) -> None:
        self._deployment, self._supervisor, self._security = deployment, supervisor, security
        self.grammars = grammars
        self._fingerprint = fingerprint_of(model.config, deployment)
        self._clients = [
            client for host in deployment.hosts for client in self.clients_of(host.name)
        ]

    @property
    def clients(self) -> Sequence[RemoteClient]:
        return self._clients

    def add_host(self, name: str) -> Sequence[RemoteClient]:
        """Start a [[host]] that was added to the mesh file since. Blocks.

        Raises RequestError, ConfigError, WorkerLostError; then nothing has changed.
        """
        deployment = grown(self._deployment, load_deployment(self._deployment.file), name)
        orders = next(iter(self._supervisor.places.values())).orders
        self._supervisor.add([replace(orders, host=name, deployment=deployment)])
        self._deployment = deployment
        return self.clients_of(name)

    def forget_worker(self, name: str) -> None:
        """The worker is gone; its host ends with the last of its workers. Blocks."""
        gone = next(worker for worker in self._deployment.workers if worker.name == name)
        rest = tuple(worker for worker in self._deployment.workers if worker is not gone)
        self._deployment = replace(self._deployment, workers=rest)
        if not self._deployment.workers_of(gone.host):
            hosts = tuple(host for host in self._deployment.hosts if host.name != gone.host)
            self._deployment = replace(self._deployment, hosts=hosts)
            self._supervisor.remove(gone.host)

    def clients_of(self, host: str) -> list[RemoteClient]:
        """New clients of the workers of a running host."""
        place = self._supervisor.places[host]
        connection = HostConnection(place, self._fingerprint, self._security)
        workers = self._deployment.workers_of(host)
        return [RemoteClient(worker.name, worker.role, connection) for worker in workers]

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits [T, V] at every position, from the first host that prefills. Blocks, compiles."""
        prefills = [w.host for w in self._deployment.workers if w.role != "decode"]
        host = (prefills or [worker.host for worker in self._deployment.workers])[0]
        address = self._supervisor.places[host].address
        if address is None:
            raise WorkerLostError(host, self._supervisor.places[host].reason)
        data, vocab_size = bytearray(), 1
        with open_blocking_channel(address, self._security) as channel:
            request = pb.LogitsRequest(token_ids=token_ids)
            try:
                for part in WorkerHostStub(channel).Logits(
                    request, timeout=LOGITS_SECONDS, metadata=self._security.metadata
                ):
                    if part.error:
                        raise load_error(part.error, host)
                    data += part.data
                    vocab_size = part.vocab_size
            except grpc.RpcError as error:
                raise WorkerLostError(host, str(error)) from error
        return np.frombuffer(bytes(data), np.float32).reshape(-1, vocab_size)

    def close(self) -> None:
        """End all hosts. Idempotent, blocks."""
        self._supervisor.close()
        if self.grammars is not None:
            self.grammars.close()


def launch_hosts(
    model: Model,
    deployment: DeploymentConfig,
    launcher: HostLauncher,
    *,
    progress: ProgressCallback | None = None,
    can_prefill_locally: bool = False,
) -> HostedFleet:
    """Start every host of the deployment and return when all are ready. Blocks.

    Raises ConfigError, WorkerLostError, and leaves no process behind when it raises; the launcher
    is closed then.
    """
    grammars: GrammarCompiler | None = None
    try:
        _check(model, deployment)
        token = read_token(deployment.security, deployment.file) or secrets.token_urlsafe(32)
        security = read_security(deployment.security, deployment.file, token)
        grammars = grammar_compiler(model)  # it reads its vocabulary while the hosts compile
        supervisor = HostSupervisor(launcher, deployment.launch, security, progress)
        supervisor.start(
            [
                HostOrders(
                    host=host.name,
                    deployment=deployment,
                    model=model.spec,
                    weights=model.config.weights,
                    can_prefill_locally=can_prefill_locally,
                    token=token,
                )
                for host in deployment.hosts
            ]
        )
    except BaseException:
        launcher.close()
        if grammars is not None:
            grammars.close()
        raise
    return HostedFleet(model, deployment, supervisor, security, grammars)


def _check(model: Model, deployment: DeploymentConfig) -> None:
    """What can be refused before anything is started. Raises ConfigError."""
    found = [address_problem(deployment, host.name, host.address) for host in deployment.hosts]
    if problems := [problem for problem in found if problem is not None]:
        raise ConfigError(problems)
    model.require_source()
