"""Hosts as real processes, on a tiny checkpoint: the same tokens, and life after a loss."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import jpd
from jpd.api import Server
from jpd.checkpoint.model_source import open_model
from jpd.cli import main
from jpd.errors import ConfigError
from jpd.launch.hosted import HostedFleet, launch_hosts
from jpd.launch.subprocess_hosts import HostProcess, SubprocessLauncher
from jpd.mesh_file import load_deployment
from tests.support.host_certificates import make_certificates

pytestmark = pytest.mark.slow

START_SECONDS = 170
CORES = sorted(os.sched_getaffinity(0))


THIRD_HOST = """
[[host]]
name = "c"
platform = "cpu"
devices = 1

[[worker]]
name = "three"
role = "colocated"
host = "c"
devices = [0]
slots = 4
"""


@pytest.fixture(scope="module")
def mesh(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hosts of other tensor sizes, a core each, with TLS and a token between them."""
    folder = tmp_path_factory.mktemp("hosts")
    security = make_certificates(repo, folder / "tls")
    text = (repo / "tests" / "launch" / "two_hosts.toml").read_text()
    text = text.replace("cores = [0]", f"cores = [{CORES[0]}]")
    text = text.replace("cores = [1]", f"cores = [{CORES[-1]}]") + "\n[security]\n"
    for name, value in asdict(security).items():
        text += f'{name} = "{value}"\n' if isinstance(value, str) else ""
    path = folder / "two_hosts.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def server(golden_llama3: Path, mesh: Path) -> Iterator[Server]:
    with jpd.launch(str(golden_llama3), mesh) as running:
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


def test_hosts_run_on_their_cores(server: Server, mesh: Path) -> None:
    for host in load_deployment(mesh).hosts:
        pid = process_of(server, host.name).pid
        for thread in Path(f"/proc/{pid}/task").iterdir():
            assert tuple(os.sched_getaffinity(int(thread.name))) == host.cores


def test_c04_c10_a_killed_host_is_noticed_replayed_and_comes_back(
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
    for worker in ("one-0", "two-0"):  # asked for by name: the other one has the prefix
        (answer,) = server.generate(
            [prompt],
            max_tokens=8,
            temperature=0.0,
            ignore_eos=True,
            prefill_worker=worker,
            decode_worker=worker,
        )
        assert list(answer.token_ids) == greedy[:8]
        assert answer.timeline is not None and answer.timeline.decode_worker == worker


def test_a_host_that_stands_still_is_silent_and_goes_on(
    server: Server, expected: dict[str, np.ndarray]
) -> None:
    """Its connections stay open: only that it says nothing shows it."""
    prompt, greedy = expected["prompts"][0].tolist(), expected["greedy"][0].tolist()
    streams = [
        server.stream(prompt, max_tokens=len(greedy), temperature=0.0, ignore_eos=True)
        for _ in range(4)
    ]
    tokens = [list(next(stream).token_ids) for stream in streams]
    stopped = process_of(server, "b").pid
    os.kill(stopped, signal.SIGSTOP)
    try:
        eventually(lambda: states(server)["two-0"] == "down", 20)
        for heard, stream in zip(tokens, streams, strict=True):
            heard += [token for delta in stream for token in delta.token_ids]
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert tokens == [greedy] * 4
    eventually(lambda: states(server)["two-0"] == "up", START_SECONDS)
    server.check_integrity()
    assert server.health().status == "ok"


def test_a_host_that_is_killed_again_while_it_starts_comes_back(
    server: Server, expected: dict[str, np.ndarray]
) -> None:
    prompt, greedy = expected["prompts"][1].tolist(), expected["greedy"][1].tolist()
    killed = process_of(server, "b").pid
    for _ in range(2):
        os.kill(killed, signal.SIGKILL)
        eventually(lambda last=killed: process_of(server, "b").pid != last, 20)
        killed = process_of(server, "b").pid
    assert states(server)["two-0"] == "down"
    eventually(lambda: states(server)["two-0"] == "up", START_SECONDS)
    (answer,) = server.generate(
        [prompt],
        max_tokens=len(greedy),
        temperature=0.0,
        ignore_eos=True,
        prefill_worker="two-0",
        decode_worker="two-0",
    )
    assert list(answer.token_ids) == greedy
    server.check_integrity()


def test_workers_come_change_and_go_while_streams_elsewhere_never_notice(
    server: Server, mesh: Path, expected: dict[str, np.ndarray]
) -> None:
    """`jpd workers` beside streams of another host, which are served as if nothing happened."""
    prompt, greedy = expected["prompts"][1].tolist(), expected["greedy"][1].tolist()
    is_over, seen = threading.Event(), []

    def ask(worker: str) -> tuple[list[int], tuple[str, ...]]:
        (answer,) = server.generate(
            [prompt],
            max_tokens=len(greedy),
            temperature=0.0,
            ignore_eos=True,
            prefill_worker=worker,
            decode_worker=worker,
        )
        return list(answer.token_ids), answer.timeline.path

    def keep_asking() -> None:
        while not is_over.is_set():
            seen.append(ask("one-0"))

    undisturbed = ask("one-0")
    assert undisturbed[0] == greedy
    doors = server.serve(http_port=0, grpc_port=None)

    def workers(*arguments: str) -> int:
        return main(["workers", "--url", f"http://127.0.0.1:{doors.http_port}", *arguments])

    mesh.write_text(mesh.read_text() + THIRD_HOST)
    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        assert workers("add", "c") == 0
        assert ask("three-0")[0] == greedy
        assert workers("drain", "two-0") == 0 and states(server)["two-0"] == "draining"
        assert workers("set-role", "two-0", "decode") == 0 and states(server)["two-0"] == "up"
        assert workers("set-role", "two-0", "colocated") == 0
        assert ask("two-0")[0] == greedy
        added = process_of(server, "c").pid
        assert workers("remove", "three-0") == 0
        assert list(states(server)) == ["one-0", "two-0"] and not is_running(added)
    finally:
        is_over.set()
        asking.join()
    assert len(seen) > 10 and all(one == undisturbed for one in seen)


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


def test_what_a_host_cannot_do_is_said_by_its_file(golden_llama3: Path, mesh: Path) -> None:
    config = load_deployment(mesh)
    hosts = (config.hosts[0], replace(config.hosts[1], cores=(4095,)))
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"two_hosts.toml: host\.b\.cores = \[4095\]"):
        launch_hosts(
            open_model(str(golden_llama3)),
            replace(config, hosts=hosts),
            SubprocessLauncher(lines.append),
        )
