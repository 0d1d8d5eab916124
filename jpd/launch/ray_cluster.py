"""All that is asked of Ray: a cluster, room for each host in it, an actor in that room.

No call leaves an exception of Ray's: they become jpd's own. Needs the extra `ray`. Called by
`jpd.launch.ray_hosts`.
"""

import importlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jpd.config import HostConfig, LaunchConfig, Placement
from jpd.errors import ConfigError, Problem, WorkerLostError

LOCAL = "local"
"""As `ray_address`: a cluster of this process's own, on this machine, that ends with it."""
OBJECT_STORE_BYTES = 100 << 20
"""Of such a cluster. Weights and KV do not go through it."""
CALLS_AT_ONCE = 4
STRATEGIES: Mapping[Placement, str] = {"spread": "SPREAD", "pack": "PACK"}


def needs_of(host: HostConfig) -> dict[str, float]:
    """What a host takes of its machine, in Ray's words."""
    needs = {"CPU": float(len(host.cores) or 1)}
    if host.platform != "cpu":
        needs[host.platform.upper()] = float(host.devices)
    return needs


class RayCluster:
    """The cluster of the mesh file, connected to. Methods may be called from any thread."""

    def __init__(self, launch: LaunchConfig, file: str) -> None:
        """Connect, or start a cluster on this machine. Raises ConfigError."""
        self._ray = _import("ray", file)
        self._groups_of = _import("ray.util", file)
        self._strategies = _import("ray.util.scheduling_strategies", file)
        self._groups: list[Any] = []
        self.is_here = False  # started here: all its machines are this one
        self._is_ours = not self._ray.is_initialized()  # a program may be connected already
        if self._is_ours:
            with _own_signals():
                self._connect(launch.ray_address, file)

    def _connect(self, address: str | None, file: str) -> None:
        quiet = {"log_to_driver": False, "configure_logging": False}
        if address != LOCAL:
            try:
                self._ray.init(address=address or "auto", **quiet)
                return
            except (OSError, RuntimeError, ValueError) as error:
                if address is not None:
                    rule = f"no Ray cluster is reached there: {error}"
                    raise ConfigError(
                        [Problem(file, "launch.ray_address", address, rule)]
                    ) from error
        self._ray.init(
            address=LOCAL,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _system_config={"worker_niceness": 0},  # hosts give way to nobody
            **quiet,
        )
        self.is_here = True

    def reserve(self, needs: Sequence[Mapping[str, float]], placement: Placement) -> Any:
        """Room for hosts that need so much each, a placement group; it may take time to come."""
        bundles = [dict(need) for need in needs]
        group = self._groups_of.placement_group(bundles, strategy=STRATEGIES[placement])
        self._groups.append(group)
        return group

    def has_room(self, group: Any, timeout_seconds: float) -> bool:
        """Whether the group has a place by then."""
        return bool(group.wait(timeout_seconds))

    def resources(self) -> dict[str, float]:
        """Of all machines of the cluster together."""
        found: Mapping[str, float] = self._ray.cluster_resources()
        return {name: amount for name, amount in found.items() if name in ("CPU", "GPU", "TPU")}

    def start(self, kind: type, needs: Mapping[str, float], group: Any, index: int) -> "RayActor":
        """An actor of this class in one bundle of the group; nobody restarts it."""
        rest = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
        strategy = self._strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        )
        options = {
            "num_cpus": needs["CPU"],
            "num_gpus": needs.get("GPU", 0),
            "resources": rest or None,
            "max_concurrency": CALLS_AT_ONCE,
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        return RayActor(self._ray, self._ray.remote(kind).options(**options).remote())

    def close(self) -> None:
        """Give all room back and let go of the cluster; one started here ends. Idempotent."""
        while self._groups:
            self._groups_of.remove_placement_group(self._groups.pop())
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()


class RayActor:
    """One actor, and calls of its methods that block."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray, self._handle = ray, handle

    def call(self, host: str, method: str, *arguments: object, seconds: float) -> Any:
        """What the method returns. Raises WorkerLostError of `host` when it cannot be had."""
        try:
            answer = getattr(self._handle, method).remote(*arguments)
            return self._ray.get(answer, timeout=seconds)
        except self._ray.exceptions.RayError as error:
            reason = f"its Ray actor: {' '.join(str(error).split())}"
            raise WorkerLostError(host, reason) from error

    def tell(self, method: str) -> None:
        """Call a method and wait for nothing."""
        getattr(self._handle, method).remote()

    def kill(self) -> None:
        """End the actor's process, whatever it does."""
        self._ray.kill(self._handle, no_restart=True)


def _import(name: str, file: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        rule = f"needs the extra: pip install 'jpd[ray]' ({error})"
        raise ConfigError([Problem(file, "launch.kind", "ray", rule)]) from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM when it is started on the main thread; it is ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
