"""Hosts kept running, on a launcher whose hosts are nothing but what a test says of them."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from jpd.config import HostConfig, LaunchConfig
from jpd.errors import ConfigError, Problem, WorkerLostError
from jpd.launch import supervisor as module
from jpd.launch.orders import HostEvent, HostOrders, OnEvent
from jpd.launch.supervisor import HostSupervisor
from jpd.rpc.failures import dump_error
from jpd.rpc.security import Security
from tests.launch.tiny_fleets import deployment, with_hosts, worker


@dataclass
class FakeHandle:
    orders: HostOrders
    tell: OnEvent
    told_to_stop: bool = False
    killed: bool = False

    def ready(self) -> None:
        self.tell(HostEvent("ready", address=f"127.0.0.1:{id(self) % 1000 + 1}", kv_address="kv"))

    def end(self, reason: str = "it fell over") -> None:
        self.tell(HostEvent("ended", reason=reason))

    def stop(self) -> None:
        self.told_to_stop = True

    def wait(self, timeout_seconds: float) -> bool:
        return self.told_to_stop

    def kill(self) -> None:
        self.killed = True


@dataclass
class FakeLauncher:
    started: list[FakeHandle] = field(default_factory=list)
    is_closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, orders: HostOrders, on_event: OnEvent) -> FakeHandle:
        with self.changed:
            self.started.append(FakeHandle(orders, on_event))
            self.changed.notify_all()
        return self.started[-1]

    def close(self) -> None:
        self.is_closed = True

    def await_start(self, number: int) -> FakeHandle:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.started) >= number, 5)
        return self.started[number - 1]


def orders_of(name: str) -> HostOrders:
    hosts = (HostConfig("a", "cpu", 1), HostConfig("b", "cpu", 1))
    config = with_hosts(deployment(worker("one-0", "colocated", [0])), *hosts)
    return HostOrders(name, config, "model", None, False, "token")


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher()


@pytest.fixture
def hosts(launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostSupervisor]:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(HostSupervisor, "_tell", lambda self, place, address: True)
    supervisor = HostSupervisor(launcher, LaunchConfig(max_restarts=2), Security())
    yield supervisor
    supervisor.close()
    assert launcher.is_closed and all(handle.killed for handle in launcher.started)


def start_both(hosts: HostSupervisor, launcher: FakeLauncher) -> None:
    starting = threading.Thread(target=hosts.start, args=([orders_of("a"), orders_of("b")],))
    starting.start()
    for number in (1, 2):
        launcher.await_start(number).ready()
    starting.join(5)
    assert not starting.is_alive()


def eventually(condition: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def test_start_waits_for_every_host(hosts: HostSupervisor, launcher: FakeLauncher) -> None:
    start_both(hosts, launcher)
    assert {place.address is not None for place in hosts.places.values()} == {True}


def test_a_host_that_ends_comes_back_until_it_has_done_so_too_often(
    hosts: HostSupervisor, launcher: FakeLauncher
) -> None:
    start_both(hosts, launcher)
    place = hosts.places["b"]
    for number in (2, 3):
        launcher.started[number - 1].end()
        handle = launcher.await_start(number + 1)
        assert place.address is None
        handle.ready()
        eventually(lambda: place.address is not None)
    launcher.started[3].end("it fell over again")
    eventually(lambda: "given up after 2 restarts" in place.reason)
    assert "it fell over again" in place.reason and place.address is None
    assert hosts.places["a"].address is not None and len(launcher.started) == 4


def test_a_while_of_service_forgives_earlier_ends_and_a_slow_start_does_not(
    hosts: HostSupervisor, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_both(hosts, launcher)
    place = hosts.places["b"]
    monkeypatch.setattr(module, "FORGIVEN_SECONDS", 0.0)
    for number in range(2, 6):
        launcher.started[number - 1].end()
        launcher.await_start(number + 1).ready()
        eventually(lambda: place.address is not None)
    for number in (6, 7, 8):  # the last two of these never served
        launcher.await_start(number).end()
    eventually(lambda: "given up after 2 restarts" in place.reason)


def test_what_keeps_a_host_from_starting_is_raised_and_the_others_end(
    hosts: HostSupervisor, launcher: FakeLauncher
) -> None:
    def fail() -> None:
        launcher.await_start(1).ready()
        error = ConfigError([Problem("f.toml", "key", 1, "is wrong")])
        handle = launcher.await_start(2)
        handle.tell(HostEvent("failed", error=dump_error(error, "b")))
        handle.end()

    threading.Thread(target=fail).start()
    with pytest.raises(ConfigError, match="f.toml: key = 1: is wrong"):
        hosts.start([orders_of("a"), orders_of("b")])
    assert all(handle.killed for handle in launcher.started)


def test_a_host_that_ends_without_a_word_is_told_by_its_status(
    hosts: HostSupervisor, launcher: FakeLauncher
) -> None:
    threading.Thread(target=lambda: launcher.await_start(2).end("status 7")).start()
    with pytest.raises(WorkerLostError, match="status 7"):
        hosts.start([orders_of("a"), orders_of("b")])


def test_a_removed_host_is_ended_and_not_started_again(
    hosts: HostSupervisor, launcher: FakeLauncher
) -> None:
    start_both(hosts, launcher)
    hosts.remove("a")
    assert launcher.started[0].killed and list(hosts.places) == ["b"]
    launcher.started[0].end()
    time.sleep(0.1)
    assert len(launcher.started) == 2
