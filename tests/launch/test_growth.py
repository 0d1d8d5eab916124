"""Which hosts may be added to a running deployment."""

from dataclasses import replace

import pytest

from jpd.config import DeploymentConfig, HostConfig, WorkerConfig
from jpd.errors import RequestError
from jpd.launch.growth import grown, like
from tests.launch.tiny_fleets import deployment, worker


def on(host: str, config: WorkerConfig) -> WorkerConfig:
    return replace(config, host=host)


PREFILL, DECODE = worker("prefill-0", "prefill", [0, 1]), worker("decode-0", "decode", [2])
RUNNING = deployment(PREFILL, DECODE)


def with_host(*workers: WorkerConfig) -> DeploymentConfig:
    hosts = (*RUNNING.hosts, HostConfig("new", "cpu", 4))
    return replace(RUNNING, hosts=hosts, workers=(*RUNNING.workers, *workers))


def test_a_worker_like_a_running_one_is_taken() -> None:
    added = on("new", worker("decode-1", "decode", [0]))
    found = grown(RUNNING, with_host(added), "new")
    assert found.workers == (PREFILL, DECODE, added) and found.hosts[-1].name == "new"
    assert like(added, RUNNING.workers) == "decode-0"
    assert like(on("new", worker("x-0", "prefill", [0, 1])), RUNNING.workers) == "prefill-0"


@pytest.mark.parametrize(
    ("workers", "host", "reason"),
    [
        ((), "host", "running already"),
        ((), "absent", "has host, new"),
        ((), "new", "has no worker"),
        ((on("new", DECODE),), "new", "named decode-0 is running"),
        ((on("new", worker("d-0", "decode", [0, 1])),), "new", "d-0 has another mesh"),
        ((on("new", worker("c-0", "colocated", [0])),), "new", "c-0 has another mesh"),
    ],
)
def test_what_the_running_executables_do_not_know_is_refused(
    workers: tuple[WorkerConfig, ...], host: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        grown(RUNNING, with_host(*workers), host)
