"""Hosts through Ray: on a cluster of paper, and on a real one where Ray is installed."""

import os
import queue
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jpd
from jpd.api import Server
from jpd.config import DeploymentConfig, HostConfig, LaunchConfig, Placement, SecurityConfig
from jpd.errors import ConfigError, WorkerLostError
from jpd.launch import ray_hosts as module
from jpd.launch.orders import HostEvent, HostOrders
from jpd.launch.ray_hosts import RayHost, RayLauncher
from jpd.rpc.failures import load_error
from tests.launch.test_subprocess_hosts import children_of, eventually, is_running, states
from tests.launch.tiny_fleets import deployment, worker

TWO_HOSTS = replace(
    deployment(
        replace(worker("prefill-0", "prefill", [0, 1]), host="a"),
        replace(worker("decode-0", "decode", [0]), host="b"),
    ),
    hosts=(HostConfig("a", "cpu", 2), HostConfig("b", "cpu", 1)),
    launch=LaunchConfig("ray", ray_address="local", placement="pack"),
)


@dataclass
class PaperActor:
    """A HostActor whose host says what a test puts into `says`."""

    address: str
    says: "queue.SimpleQueue[HostEvent | str]" = field(default_factory=queue.SimpleQueue)
    called: list[str] = field(default_factory=list)
    orders: HostOrders | None = None
    is_lost: bool = False

    def call(self, host: str, method: str, *arguments: Any, seconds: float) -> Any:
        if self.is_lost:
            raise WorkerLostError(host, "its Ray actor: the node is gone")
        if method == "address":
            return self.address
        if method == "start":
            self.orders, _ = arguments
        if method == "hear":
            try:
                return [self.says.get(timeout=0.01)]
            except queue.Empty:
                return []
        self.tell(method)
        return None

    def tell(self, method: str) -> None:
        self.called.append(method)
        if method in ("stop", "kill"):
            self.says.put(HostEvent("ended", reason="it was told to"))

    def kill(self) -> None:
        self.called.append("kill actor")
        self.is_lost = True


@dataclass
class PaperCluster:
    """A cluster whose machines have room for so many groups."""

    address: str = "127.0.0.1"
    room: int = 100
    is_here: bool = False
    groups: list[tuple[list[dict[str, float]], Placement]] = field(default_factory=list)
    actors: list[tuple[PaperActor, Mapping[str, float], int, int]] = field(default_factory=list)
    is_closed: bool = False

    def reserve(self, needs: Sequence[Mapping[str, float]], placement: Placement) -> int:
        self.groups.append(([dict(need) for need in needs], placement))
        return len(self.groups) - 1

    def has_room(self, group: int, timeout_seconds: float) -> bool:
        return group < self.room

    def resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def start(self, kind: type, needs: Mapping[str, float], group: int, index: int) -> PaperActor:
        assert kind is module.HostActor
        self.actors.append((PaperActor(self.address), needs, group, index))
        return self.actors[-1][0]

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Told:
    """What a host's events and log lines were."""

    events: list[HostEvent] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def orders_of(name: str, config: DeploymentConfig = TWO_HOSTS) -> HostOrders:
    return HostOrders(name, config, "model", None, False, "token")


def started(cluster: PaperCluster, told: Told, orders: HostOrders) -> RayHost:
    launcher = RayLauncher(cluster, orders.deployment, told.lines.append)
    return launcher.start(orders, told.events.append)


def test_hosts_are_placed_as_the_file_says_and_speak_through_their_actors() -> None:
    hosts = (HostConfig("a", "gpu", 4), HostConfig("b", "gpu", 2))
    config = replace(TWO_HOSTS, hosts=hosts, launch=LaunchConfig("ray", placement="spread"))
    cluster, told = PaperCluster(), Told()
    launcher = RayLauncher(cluster, config, told.lines.append)
    assert cluster.groups == [([{"CPU": 1.0, "GPU": 4.0}, {"CPU": 1.0, "GPU": 2.0}], "spread")]
    host = launcher.start(orders_of("b", config), told.events.append)
    eventually(lambda: bool(cluster.actors) and cluster.actors[0][0].orders is not None, 5)
    actor, needs, group, index = cluster.actors[0]
    assert (needs, group, index) == ({"CPU": 1.0, "GPU": 2.0}, 0, 1)
    actor.says.put("b | it loads")
    actor.says.put(HostEvent("ready", address="127.0.0.1:1"))
    eventually(lambda: told.kinds() == ["ready"] and told.lines == ["b | it loads"], 5)
    host.stop()
    assert host.wait(5) and told.kinds() == ["ready", "ended"]
    host.kill()
    assert actor.called == ["start", "stop", "kill actor"]
    added = HostConfig("c", "gpu", 1)  # later, with room of its own
    grown = replace(config, hosts=(*hosts, added))
    launcher.start(orders_of("c", grown), told.events.append).kill()
    assert cluster.groups[1:] == [([{"CPU": 1.0, "GPU": 1.0}], "spread")]
    launcher.close()
    assert cluster.is_closed


def test_a_host_listens_where_ray_knows_its_machine_and_not_in_the_clear() -> None:
    cluster, told = PaperCluster(address="10.0.0.7"), Told()
    host = started(cluster, told, orders_of("a"))
    assert host.wait(5) and told.kinds() == ["failed", "ended"]
    error = load_error(told.events[0].error, "a")
    assert "host.a.address = '10.0.0.7': others can reach this address" in str(error)
    assert cluster.actors[0][0].orders is None
    told.events.clear()
    config = replace(TWO_HOSTS, security=SecurityConfig(insecure=True))
    host = started(cluster, told, orders_of("a", config))
    eventually(lambda: len(cluster.actors) == 2 and cluster.actors[1][0].orders is not None, 5)
    taken = cluster.actors[1][0].orders
    assert taken is not None and taken.config.address == "10.0.0.7"
    cluster.actors[1][0].is_lost = True
    assert host.wait(5) and told.events[0].reason == "its Ray actor: the node is gone"
    host.kill()


def test_a_cluster_without_room_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_SECONDS", 0.0)
    cluster, told = PaperCluster(room=0), Told()
    launch = replace(TWO_HOSTS.launch, start_timeout_seconds=0.1)
    host = started(cluster, told, orders_of("a", replace(TWO_HOSTS, launch=launch)))
    assert host.wait(5)
    lack = "no room: [{'CPU': 1.0}, {'CPU': 1.0}] is needed, the Ray cluster has {'CPU': 2.0}"
    assert told.events[-1].reason == lack and told.lines[0] == f"a | {lack}"
    endless = started(cluster, told, orders_of("a"))
    endless.kill()  # while it waits
    assert told.events[-1].reason == "it was ended before it began" and not cluster.actors


def test_without_ray_the_extra_is_named(
    golden_llama3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"launch.kind = 'ray': .*pip install 'jpd\[ray\]'"):
        jpd.launch(str(golden_llama3), TWO_HOSTS).start()


@pytest.fixture(scope="module")
def server(golden_llama3: Path) -> Iterator[Server]:
    """On a cluster of its own, on loopback."""
    pytest.importorskip("ray")
    before = signal.getsignal(signal.SIGTERM)
    with jpd.launch(str(golden_llama3), TWO_HOSTS) as running:
        assert signal.getsignal(signal.SIGTERM) is before
        yield running
    assert not processes_of_hosts(), "nothing is left behind"


def processes_of_hosts() -> dict[int, int]:
    """Processes of hosts below this one, and the process that started each: its actor."""
    found, looked_at = {}, [os.getpid()]
    while looked_at:
        parent = looked_at.pop()
        try:
            children = children_of(parent)
        except OSError:
            continue
        looked_at += children
        for child in children:
            command = Path(f"/proc/{child}/cmdline").read_bytes() if is_running(child) else b""
            if b"jpd.launch.host" in command:
                found[child] = parent
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_tokens_are_those_of_one_process(server: Server, golden_llama3: Path) -> None:
    expected = np.load(golden_llama3 / "expected.npz")
    prompts, greedy = expected["prompts"].tolist(), expected["greedy"].tolist()
    answers = server.generate(prompts, max_tokens=len(greedy[0]), temperature=0.0, ignore_eos=True)
    assert [list(answer.token_ids) for answer in answers] == greedy
    assert {answer.timeline.kv_bytes > 0 for answer in answers} == {True}
    assert len(processes_of_hosts()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the host's process", "its actor"])
def test_a_killed_host_is_noticed_and_comes_back(
    server: Server, golden_llama3: Path, what: str
) -> None:
    before = processes_of_hosts()
    host, actor = max(before.items())
    os.kill(host if what == "the host's process" else actor, signal.SIGKILL)
    assert eventually(lambda: "down" in states(server).values(), 2.0) < 2.0
    eventually(lambda: set(states(server).values()) == {"up"}, 170)
    assert host not in processes_of_hosts() and len(processes_of_hosts()) == 2
    test_tokens_are_those_of_one_process(server, golden_llama3)
