"""Hosts as real processes, on a tiny checkpoint: the same tokens, and life after a loss."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jpd
from jpd.api import Server
from jpd.checkpoint.model_source import open_model
from jpd.config import HostConfig, LaunchConfig, WorkerConfig
from jpd.errors import ConfigError
from jpd.launch.hosted import HostedFleet, launch_hosts
from jpd.launch.subprocess_hosts import HostProcess, SubprocessLauncher
from jpd.mesh_file import resolve_platform
from tests.launch.tiny_fleets import deployment, worker

pytestmark = pytest.mark.slow

START_SECONDS = 170


def on(host: str, config: WorkerConfig) -> WorkerConfig:
    return replace(config, host=host)


TWO_HOSTS = resolve_platform(
    replace(
        deployment(
            on("a", worker("one-0", "colocated", [0, 1])),
            on("b", worker("two-0", "colocated", [0])),
        ),
        hosts=(
            HostConfig("a", "cpu", 2, cores=(min(os.sched_getaffinity(0)),)),
            HostConfig("b", "cpu", 1, cores=(max(os.sched_getaffinity(0)),)),
        ),
        launch=LaunchConfig("subprocess"),
    )
)


@pytest.fixture(scope="module")
def server(golden_llama3: Path) -> Iterator[Server]:
    with jpd.launch(str(golden_llama3), TWO_HOSTS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(golden_llama3: Path) -> dict[str, np.ndarray]:
    return dict(np.load(golden_llama3 / "expected.npz"))


def fleet_of(server: Server) -> HostedFleet:
    fleet = server._fleet
    assert isinstance(fleet, HostedFleet)
    return fleet


def process_of(server: Server, host: str) -> HostProcess:
    handle = fleet_of(server)._supervisor.places[host].handle
    assert isinstance(handle, HostProcess)
    return handle


def states(server: Server) -> dict[str, str]:
    return {health.name: health.state for health in server.health().workers}


def eventually(condition: Callable[[], bool], seconds: float) -> float:
    """How long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds
        time.sleep(0.02)
    return time.monotonic() - started


def test_tokens_and_logits_are_those_of_one_process(
    server: Server, expected: dict[str, np.ndarray]
) -> None:
    prompts = [row.tolist() for row in expected["prompts"]]
    answers = server.generate(
        prompts, max_tokens=expected["greedy"].shape[1], temperature=0.0, ignore_eos=True
    )
    for answer, greedy in zip(answers, expected["greedy"], strict=True):
        assert list(answer.token_ids) == greedy.tolist()
    workers = {answer.timeline.decode_worker for answer in answers}
    assert workers == {"one-0", "two-0"}, "both hosts have worked"
    assert np.abs(server.logits(prompts[0]) - expected["logits"][0]).max() < 2e-4
    assert server.health().status == "ok"


def test_hosts_run_on_their_cores(server: Server) -> None:
    for host in TWO_HOSTS.hosts:
        pid = process_of(server, host.name).pid
        for thread in Path(f"/proc/{pid}/task").iterdir():
            assert tuple(os.sched_getaffinity(int(thread.name))) == host.cores


def test_a_killed_host_is_noticed_replayed_and_comes_back(
    server: Server, expected: dict[str, np.ndarray]
) -> None:
    """C10 over processes: no token twice, none missing, the same text."""
    prompt, greedy = expected["prompts"][0].tolist(), expected["greedy"][0].tolist()
    streams = [
        server.stream(prompt, max_tokens=len(greedy), temperature=0.0, ignore_eos=True)
        for _ in range(2)
    ]
    tokens: list[list[int]] = [[], []]
    for index, stream in enumerate(streams):
        tokens[index] += next(stream).token_ids
    killed = process_of(server, "b").pid
    os.kill(killed, signal.SIGKILL)
    assert eventually(lambda: states(server)["two-0"] == "down", 2.0) < 2.0
    assert states(server)["one-0"] == "up" and server.health().is_ready
    for index, stream in enumerate(streams):
        tokens[index] += [token for delta in stream for token in delta.token_ids]
    assert tokens == [greedy, greedy]
    eventually(lambda: states(server)["two-0"] == "up", START_SECONDS)
    assert process_of(server, "b").pid != killed
    answers = server.generate([prompt] * 4, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert all(list(answer.token_ids) == greedy[:8] for answer in answers)
    assert "two-0" in {answer.timeline.decode_worker for answer in answers}


def test_hosts_end_with_whoever_started_them(repo: Path, golden_llama3: Path) -> None:
    """However that comes: here by SIGKILL, while they import."""
    mesh = repo / "tests" / "launch" / "two_hosts.toml"
    parent = subprocess.Popen(
        [sys.executable, "-m", "jpd", "serve", "--model", str(golden_llama3), "--mesh", str(mesh)]
        + ["--http-port", "0", "--grpc-port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children: list[int] = []

    def has_children() -> bool:
        children[:] = children_of(parent.pid)
        return len(children) == 2

    try:
        eventually(has_children, 60)
    finally:
        parent.kill()
        parent.wait()
    eventually(lambda: not any(is_running(pid) for pid in children), 60)  # once imported


def is_running(pid: int) -> bool:
    """A zombie has ended: where process 1 does not wait for orphans, it stays one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += (task / "children").read_text().split()
    return [int(child) for child in found]


def test_what_a_host_cannot_do_is_said_by_its_file(golden_llama3: Path) -> None:
    cores = (4095,)
    hosts = (TWO_HOSTS.hosts[0], replace(TWO_HOSTS.hosts[1], cores=cores))
    model = open_model(str(golden_llama3))
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"tiny.toml: host\.b\.cores = \[4095\]"):
        launch_hosts(model, replace(TWO_HOSTS, hosts=hosts), SubprocessLauncher(lines.append))
