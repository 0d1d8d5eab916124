"""What launchers cannot start, and that they leave nothing behind."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from jpd.cache.kv_cache import KVSpec
from jpd.checkpoint.model_source import Model, open_model
from jpd.config import CacheConfig, HostConfig, KVTransport, SecurityConfig
from jpd.errors import ConfigError
from jpd.launch.devices import num_pool_pages
from jpd.launch.inprocess import launch_workers
from jpd.launch.orders import address_problem
from jpd.mesh_file import resolve_platform
from tests.launch.tiny_fleets import deployment, with_hosts, worker

PAIR = resolve_platform(
    deployment(worker("prefill-0", "prefill", [0]), worker("decode-0", "decode", [1]))
)


@pytest.fixture(scope="module")
def model(golden_llama3: Path) -> Model:
    return open_model(str(golden_llama3))


def problem_of(error: pytest.ExceptionInfo[ConfigError]) -> str:
    (problem,) = error.value.problems
    return str(problem)


def test_several_hosts_need_another_launcher(model: Model) -> None:
    hosts = (HostConfig("host", "cpu", 8), HostConfig("other", "cpu", 8))
    with pytest.raises(ConfigError) as error:
        launch_workers(model, with_hosts(PAIR, *hosts))
    shown = problem_of(error)
    assert "tiny.toml" in shown and "['host', 'other']" in shown
    assert "[launch] kind = subprocess" in shown


def test_more_devices_than_there_are(model: Model) -> None:
    with pytest.raises(ConfigError) as error:
        launch_workers(model, with_hosts(PAIR, HostConfig("host", "cpu", 9)))
    assert "9" in problem_of(error) and "8 CPU devices" in problem_of(error)


def test_a_platform_that_is_not_here(model: Model) -> None:
    with pytest.raises(ConfigError) as error:
        launch_workers(model, with_hosts(PAIR, HostConfig("host", "tpu", 1)))
    assert "host.host.platform = 'tpu'" in problem_of(error)


def test_a_model_without_weights(model: Model) -> None:
    with pytest.raises(ConfigError, match="weights are not on this machine"):
        launch_workers(replace(model, source=None), PAIR)


def test_a_pool_of_unknown_size_leaves_no_thread(model: Model) -> None:
    before = set(threading.enumerate())
    config = replace(PAIR, cache=replace(PAIR.cache, pages=None))
    with pytest.raises(ConfigError, match="does not say how much memory it has"):
        launch_workers(model, config)
    assert set(threading.enumerate()) <= before


def test_a_failing_start_leaves_no_thread(model: Model) -> None:
    class Refusing:
        def __init__(self, inner) -> None:
            self._inner = inner
            self.close = inner.close

        def register(self, worker, mesh, deliver, serve) -> None:
            self._inner.register(worker, mesh, deliver, serve)
            raise RuntimeError("no more destinations")

    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no more destinations"):
        launch_workers(model, PAIR, transfer_wrapper=Refusing)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("address", "security", "transport", "rule"),
    [
        ("127.0.0.5", SecurityConfig(), "jax_transfer", None),
        ("10.0.0.7", SecurityConfig(), "host_staged", "host.host.address = '10.0.0.7': others can"),
        ("node-a", SecurityConfig(token_file="t"), "host_staged", "host.host.address = 'node-a'"),
        ("10.0.0.7", SecurityConfig("t", "ca", "pem", "key"), "host_staged", None),
        ("10.0.0.7", SecurityConfig("t", "ca", "pem", "key"), "jax_transfer", "does not encrypt"),
        ("10.0.0.7", SecurityConfig(insecure=True), "jax_transfer", None),
    ],
)
def test_nothing_goes_over_a_network_in_the_clear_unasked(
    address: str, security: SecurityConfig, transport: KVTransport, rule: str | None
) -> None:
    cache = replace(PAIR.cache, transport=transport)
    problem = address_problem(replace(PAIR, security=security, cache=cache), "host", address)
    assert rule is None if problem is None else rule is not None and rule in str(problem)


class FakeDevice:
    def __init__(self, limit: int, in_use: int) -> None:
        self._stats = {"bytes_limit": limit, "bytes_in_use": in_use}

    def memory_stats(self) -> dict[str, int]:
        return self._stats


def test_pages_fill_what_the_fullest_device_leaves() -> None:
    page = KVSpec(4, 1, 16, 8, 128, "float32")
    page_bytes = 4 * 16 * 8 * 128 * 4 // 2  # heads are split over two devices
    cache = CacheConfig(page_size=16, memory_fraction=0.5)
    devices = [FakeDevice(100 * page_bytes, 10 * page_bytes), FakeDevice(100 * page_bytes, 0)]
    config = worker("decode-0", "decode", [0, 1])
    assert num_pool_pages(config, page, cache, devices, "f.toml") == 40
    assert num_pool_pages(config, page, replace(cache, pages=7), devices, "f.toml") == 7
    with pytest.raises(ConfigError, match="worker.decode-0: cache.memory_fraction = 0.1"):
        num_pool_pages(config, page, replace(cache, memory_fraction=0.1), devices, "f.toml")
