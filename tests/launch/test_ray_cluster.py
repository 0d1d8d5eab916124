"""What is asked of Ray, on a Ray of paper: clusters found or started, placement, actors."""

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from jpd.config import HostConfig, LaunchConfig, Placement
from jpd.errors import ConfigError, WorkerLostError
from jpd.launch.ray_cluster import RayCluster, needs_of


class RayError(Exception):
    pass


@dataclass
class PaperRay:
    """The parts of Ray that are used. `clusters`: addresses at which there is one."""

    clusters: tuple[str, ...] = ()
    is_connected: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    groups: list[tuple[list[dict[str, float]], str]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    killed: int = 0
    exceptions: Any = field(default_factory=lambda: SimpleNamespace(RayError=RayError))

    def is_initialized(self) -> bool:
        return self.is_connected

    def init(self, **options: Any) -> None:
        self.asked.append(options)
        if options["address"] not in ("local", *self.clusters):
            raise ConnectionError("nobody there")
        self.is_connected = True

    def shutdown(self) -> None:
        self.is_connected = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, "GPU": 4.0, "memory": 1e9, "node:here": 1.0}

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.groups.append((bundles, strategy))
        return SimpleNamespace(wait=lambda seconds: seconds > 1)

    def remove_placement_group(self, group: Any) -> None:
        self.groups.pop()

    def PlacementGroupSchedulingStrategy(  # noqa: N802  # as Ray names it
        self, group: Any, placement_group_bundle_index: int
    ) -> Any:
        return ("in", group, placement_group_bundle_index)

    def remote(self, kind: type) -> Any:
        def options(**options: Any) -> Any:
            self.options = options
            greet = SimpleNamespace(remote=lambda name: f"hello {name}")
            fail = SimpleNamespace(remote=lambda: RayError("the actor\n died"))
            return SimpleNamespace(remote=lambda: SimpleNamespace(greet=greet, fail=fail))

        return SimpleNamespace(options=options)

    def get(self, answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, handle: Any, no_restart: bool) -> None:
        assert no_restart
        self.killed += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PaperRay:
    paper = PaperRay()
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, paper)
    return paper


def cluster(address: str | None = None) -> RayCluster:
    return RayCluster(LaunchConfig("ray", ray_address=address), "f.toml")


@pytest.mark.parametrize(
    ("given", "clusters", "tried"),
    [
        (None, ("auto",), ["auto"]),
        (None, (), ["auto", "local"]),
        ("local", ("auto",), ["local"]),
        ("10.0.0.1:6379", ("10.0.0.1:6379",), ["10.0.0.1:6379"]),
    ],
)
def test_the_cluster_is_found_or_started(
    ray: PaperRay, given: str | None, clusters: tuple[str, ...], tried: list[str]
) -> None:
    ray.clusters = clusters
    found = cluster(given)
    assert [options["address"] for options in ray.asked] == tried
    assert found.is_here == (tried[-1] == "local")
    found.close()
    assert not ray.is_connected


def test_a_cluster_that_was_named_must_be_there(ray: PaperRay) -> None:
    with pytest.raises(ConfigError, match=r"launch.ray_address = '10.0.0.1:6379': .* nobody there"):
        cluster("10.0.0.1:6379")


def test_a_program_stays_connected_to_its_ray_and_gets_its_room_back(ray: PaperRay) -> None:
    ray.is_connected = True
    found = cluster()
    found.reserve([{"CPU": 1.0}], "pack")
    found.close()
    assert not ray.asked and ray.is_connected and not ray.groups


@pytest.mark.parametrize(("placement", "strategy"), [("spread", "SPREAD"), ("pack", "PACK")])
def test_placement_as_the_file_says(ray: PaperRay, placement: Placement, strategy: str) -> None:
    found = cluster()
    hosts = [HostConfig("a", "gpu", 4), HostConfig("b", "tpu", 8), HostConfig("c", "cpu", 2)]
    group = found.reserve([needs_of(host) for host in hosts], placement)
    bundles = [{"CPU": 1.0, "GPU": 4.0}, {"CPU": 1.0, "TPU": 8.0}, {"CPU": 1.0}]
    assert ray.groups == [(bundles, strategy)]
    assert found.has_room(group, 2.0) and not found.has_room(group, 0.5)
    assert found.resources() == {"CPU": 8.0, "GPU": 4.0}
    wanted = [(4.0, None), (0, {"TPU": 8.0}), (0, None)]
    for index, (host, (gpus, rest)) in enumerate(zip(hosts, wanted, strict=True)):
        actor = found.start(object, needs_of(host), group, index)
        assert ray.options["scheduling_strategy"] == ("in", group, index)
        assert (ray.options["num_cpus"], ray.options["num_gpus"]) == (1.0, gpus)
        assert ray.options["resources"] == rest and ray.options["max_restarts"] == 0
    assert actor.call("c", "greet", "you", seconds=1.0) == "hello you"
    with pytest.raises(WorkerLostError, match="its Ray actor: the actor died"):
        actor.call("c", "fail", seconds=1.0)
    actor.kill()
    assert ray.killed == 1
