"""Hosts on a Ray cluster: Ray chooses the machine, an actor there keeps the host's process.

1. One placement group has room for every host of the file, spread or packed.
2. In each part of it an actor starts the host's process, as `subprocess_hosts` does here.
3. The actor keeps what the process says, events and log lines, until it is asked for them.
A host that has ended is started by the supervisor, in the same room; when its machine is gone Ray
finds other room first. Whatever ends this process ends its actors, and they end their hosts.
"""

import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from jpd.config import DeploymentConfig, HostConfig, Placement
from jpd.errors import ConfigError, WorkerLostError
from jpd.launch.orders import HostEvent, HostOrders, OnEvent, address_problem
from jpd.launch.ray_cluster import needs_of
from jpd.launch.subprocess_hosts import HostProcess, OnLine, to_stderr
from jpd.log_lines import JSON_VARIABLE, line_of_host, wants_json
from jpd.rpc.failures import dump_error

HEAR_SECONDS = 1.0
ANSWER_SECONDS = 30.0
"""An actor that says nothing for so long is lost; the router has noticed long before."""
LOOK_SECONDS = 0.5
TELL_SECONDS = 10.0
KILL_SECONDS = 5.0


class HostActor:
    """Runs on the host's machine, as a Ray actor whose methods may run at the same time."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[HostEvent | str] = queue.SimpleQueue()
        self._process: HostProcess | None = None

    def address(self) -> str:
        """Of this machine, as Ray's other machines know it."""
        from ray.util import get_node_ip_address

        return str(get_node_ip_address())

    def start(self, orders: HostOrders, logs_json: bool) -> None:
        os.environ[JSON_VARIABLE] = "1" if logs_json else "0"  # the process inherits it
        self._process = HostProcess(orders, self._said.put, self._said.put)

    def hear(self) -> list[HostEvent | str]:
        """Events and log lines since the last time, in order; waits a while for the first."""
        said: list[HostEvent | str] = []
        with suppress(queue.Empty):
            said.append(self._said.get(timeout=HEAR_SECONDS))
            while True:
                said.append(self._said.get_nowait())
        return said

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class Actor(Protocol):
    """A HostActor from afar."""

    def call(self, host: str, method: str, *arguments: object, seconds: float) -> Any:
        """What the method returns; blocks. Raises WorkerLostError of `host`."""
        ...

    def tell(self, method: str) -> None:
        """Call a method and wait for nothing."""
        ...

    def kill(self) -> None: ...


class Cluster(Protocol):
    """What is needed of `jpd.launch.ray_cluster.RayCluster`."""

    @property
    def is_here(self) -> bool:
        """Whether all its machines are this one."""
        ...

    def reserve(self, needs: Sequence[Mapping[str, float]], placement: Placement) -> Any: ...

    def has_room(self, group: Any, timeout_seconds: float) -> bool: ...

    def resources(self) -> dict[str, float]: ...

    def start(self, kind: type, needs: Mapping[str, float], group: Any, index: int) -> Actor: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Room:
    """A host's part of a placement group, and what all parts of it need."""

    group: Any
    index: int
    needs: Sequence[Mapping[str, float]]


class RayLauncher:
    """Starts hosts on a cluster. A HostLauncher; `close` lets go of the cluster."""

    def __init__(
        self, cluster: Cluster, deployment: DeploymentConfig, on_line: OnLine = to_stderr
    ) -> None:
        self._cluster, self._on_line = cluster, on_line
        self._rooms = self._reserve(deployment.hosts, deployment.launch.placement)

    def _reserve(self, hosts: Sequence[HostConfig], placement: Placement) -> dict[str, Room]:
        needs = [needs_of(host) for host in hosts]
        group = self._cluster.reserve(needs, placement)
        return {host.name: Room(group, index, needs) for index, host in enumerate(hosts)}

    def start(self, orders: HostOrders, on_event: OnEvent) -> "RayHost":
        if orders.host not in self._rooms:  # added since: room of its own
            placement = orders.deployment.launch.placement
            self._rooms |= self._reserve([orders.config], placement)
        return RayHost(self._cluster, self._rooms[orders.host], orders, on_event, self._on_line)

    def close(self) -> None:
        self._cluster.close()


class RayHost:
    """One host, from its start; a thread gets it room, then listens to it until it has ended."""

    def __init__(
        self, cluster: Cluster, room: Room, orders: HostOrders, on_event: OnEvent, on_line: OnLine
    ) -> None:
        self._cluster, self._room, self._orders = cluster, room, orders
        self._on_event, self._on_line = on_event, on_line
        self._actor: Actor | None = None
        self._is_unwanted = False
        self._thread = threading.Thread(target=self._run, name=f"host-{orders.host}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_unwanted = True
        if self._actor is not None:
            self._actor.tell("stop")

    def wait(self, timeout_seconds: float) -> bool:
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        self._is_unwanted = True
        if self._actor is not None:
            if self._thread.is_alive():
                with suppress(WorkerLostError):  # then its actor has ended, and so has it
                    self._actor.call(self._orders.host, "kill", seconds=KILL_SECONDS)
            self._actor.kill()
        self._thread.join()

    def _run(self) -> None:
        host = self._orders.host
        try:
            reason = self._listen(self._start())
        except ConfigError as error:
            self._on_event(HostEvent("failed", error=dump_error(error, host)))
            reason = "it cannot run there"
        except WorkerLostError as error:
            reason = error.reason
        self._on_event(HostEvent("ended", reason=reason))

    def _start(self) -> Actor:
        """The actor, when the host's process runs. Raises ConfigError, WorkerLostError."""
        host, needs = self._orders.host, needs_of(self._orders.config)
        timeout_seconds = self._orders.deployment.launch.start_timeout_seconds
        self._await_room(timeout_seconds)
        self._actor = self._cluster.start(HostActor, needs, self._room.group, self._room.index)
        if self._is_unwanted:  # `kill` may have come before there was an actor
            self._actor.kill()
            raise WorkerLostError(host, "it was ended before it began")
        address = str(self._actor.call(host, "address", seconds=timeout_seconds))
        orders = self._orders if self._cluster.is_here else self._orders.at(address)
        if problem := address_problem(orders.deployment, host, orders.config.address):
            raise ConfigError([problem])
        self._actor.call(host, "start", orders, wants_json(), seconds=ANSWER_SECONDS)
        return self._actor

    def _await_room(self, timeout_seconds: float) -> None:
        """Raises WorkerLostError when none is found in this time."""
        host, started = self._orders.host, time.monotonic()
        told = started
        while not self._cluster.has_room(self._room.group, LOOK_SECONDS):
            now = time.monotonic()
            if self._is_unwanted:
                raise WorkerLostError(host, "it was ended before it began")
            needed = [dict(need) for need in self._room.needs]
            lack = f"no room: {needed} is needed, the Ray cluster has {self._cluster.resources()}"
            if now > started + timeout_seconds:
                raise WorkerLostError(host, lack)
            if now > told + TELL_SECONDS:
                told = now
                self._on_line(line_of_host(host, lack, wants_json()))

    def _listen(self, actor: Actor) -> str:
        """Hand on what the host says until it has ended, and return how. Raises WorkerLostError."""
        while True:
            for said in actor.call(self._orders.host, "hear", seconds=ANSWER_SECONDS):
                if isinstance(said, str):
                    self._on_line(said)
                elif said.kind == "ended":
                    return str(said.reason)
                else:
                    self._on_event(said)
