"""The Python API over workers without devices: both faces, sessions, doors, starting and ending."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import jpd
from jpd.api import Server, launch
from jpd.checkpoint.model_source import GenerationDefaults, Model
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, RequestCancelledError, RequestError
from tests.frontend.fake_router import VOCAB_SIZE
from tests.support.fake_server import FakeFleet, make_tiny_model, write_deployment


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> DeploymentConfig:
    return write_deployment(tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def model(repo: Path) -> Model:
    return make_tiny_model(repo)


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
def server(
    model: Model, deployment: DeploymentConfig, fleet: FakeFleet
) -> Generator[Server, None, None]:
    with Server(model, deployment, lambda: fleet) as server:
        yield server


def wait_until(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def test_generate_gives_answers_in_order(server: Server) -> None:
    answers = server.generate(["a", [65, 66], "c"], max_tokens=3)
    assert [answer.text for answer in answers] == ["bcd", "CDE", "def"]
    assert [answer.num_prompt_tokens for answer in answers] == [1 + 1, 2, 1 + 1]
    assert answers[1].token_ids == (67, 68, 69)
    assert answers[0].finish_reason == "length"
    assert answers[0].timeline is not None
    assert answers[0].timeline.decode_worker == "decode-0"


def test_one_prompt_may_be_text_or_ids(server: Server) -> None:
    assert [answer.text for answer in server.generate("a", max_tokens=2)] == ["bc"]
    assert [answer.text for answer in server.generate([65], max_tokens=2)] == ["BC"]


def test_n_choices_of_a_prompt_stand_together(server: Server) -> None:
    answers = server.generate(["a", "k"], n=2, max_tokens=1)
    assert [answer.text for answer in answers] == ["b", "b", "l", "l"]


def test_stream_joins_to_generate(server: Server) -> None:
    deltas = list(server.stream("a", max_tokens=5, session_id="s", slo="interactive"))
    assert "".join(delta.text for delta in deltas) == "bcdef"
    assert deltas[-1].finish_reason == "length" and deltas[-1].timeline is not None


async def test_async_twins(server: Server) -> None:
    [answer] = await server.agenerate("a", max_tokens=3)
    assert answer.text == "bcd"
    texts = [delta.text async for delta in server.astream("a", max_tokens=3)]
    assert "".join(texts) == "bcd"
    both = await asyncio.gather(*(server.agenerate(p, max_tokens=2) for p in ("a", "k")))
    assert [answers[0].text for answers in both] == ["bc", "lm"]


async def test_async_with(model: Model, deployment: DeploymentConfig, fleet: FakeFleet) -> None:
    async with Server(model, deployment, lambda: fleet) as server:
        assert (await server.agenerate("a", max_tokens=1))[0].text == "b"
    assert fleet.num_closed == 1


def test_stop_strings_end_as_a_success(server: Server) -> None:
    [answer] = server.generate("a", max_tokens=20, stop=["fg"])
    assert (answer.text, answer.finish_reason) == ("bcde", "stop")
    assert answer.timeline is not None
    assert server.metrics.value("jpd:requests_total", outcome="finished") == 1


def test_e20_leaving_a_stream_frees_everything(model: Model, deployment: DeploymentConfig) -> None:
    fleet = FakeFleet(step_seconds=0.005)
    with Server(model, deployment, lambda: fleet) as server:
        for delta in server.stream("a", max_tokens=200):
            if "d" in delta.text:
                break
        assert wait_until(lambda: fleet.num_held == 0)


async def test_e20_leaving_an_async_stream_frees_everything(
    model: Model, deployment: DeploymentConfig
) -> None:
    fleet = FakeFleet(step_seconds=0.005)
    async with Server(model, deployment, lambda: fleet) as server:
        stream = server.astream("a", max_tokens=200)
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(server.agenerate("a", max_tokens=200))
        await asyncio.to_thread(wait_until, lambda: fleet.num_held > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(wait_until, lambda: fleet.num_held == 0)


def test_wrong_arguments_name_the_field(server: Server) -> None:
    for options, field in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"n": 0}, "n"),
        ({"slo": "unknown"}, "slo"),
        ({"timeout_seconds": "1"}, "timeout_seconds"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids[0]"),
    ):
        with pytest.raises(RequestError) as caught:
            server.generate("a", **options)  # type: ignore[arg-type]
        assert caught.value.field == field
    for prompt in ("", [], [""], [-1], [VOCAB_SIZE], "x" * 5000):
        with pytest.raises(RequestError, match="prompt"):
            server.generate(prompt)
    with pytest.raises(TypeError, match="temprature"):
        server.generate("a", temprature=1)  # type: ignore[call-arg]


def test_defaults_are_those_of_the_models_authors(
    model: Model, deployment: DeploymentConfig, fleet: FakeFleet
) -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=64, repetition_penalty=1.1)
    recommended = replace(model, generation=defaults)
    with Server(recommended, deployment, lambda: fleet) as server:
        server.generate("a", max_tokens=1)
        server.generate("a", max_tokens=1, temperature=0.0)
    sampling = [attempt.sampling for attempt in fleet.decode.attempts["reserve"]]
    found = [(item.temperature, item.top_k, item.repetition_penalty) for item in sampling]
    assert found == [(0.6, 64, 1.1), (0.0, 64, 1.1)]


def test_serve_opens_both_doors_and_close_shuts_them(
    model: Model, deployment: DeploymentConfig, fleet: FakeFleet
) -> None:
    with Server(model, deployment, lambda: fleet) as server:
        endpoints = server.serve()
        assert endpoints.http_port and endpoints.grpc_port
        url = f"http://{endpoints.host}:{endpoints.http_port}"
        body = {"prompt": "a", "max_tokens": 3, "include_details": True}
        [choice] = httpx.post(f"{url}/v1/completions", json=body).json()["choices"]
        assert choice["text"] == "bcd"
        assert choice["details"]["decode_worker"] == "decode-0"
        health = httpx.get(f"{url}/health").json()
        assert (health["status"], health["reasons"]) == ("ok", [])
        events = httpx.get(f"{url}/timeline").json()["traceEvents"]
        lanes = [event["args"]["name"] for event in events if event["ph"] == "M"]
        assert lanes == ["queue", "decode-0", "prefill-0"]
        assert {event["name"] for event in events if event["ph"] == "X"} >= {"prefill", "decode"}
        assert len(server.trace.requests()) == 1
        assert {worker["state"] for worker in health["workers"]} == {"up"}
        assert "jpd:requests_total" in httpx.get(f"{url}/metrics").text
        error = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "slo": "x"})
        assert error.status_code == 400 and error.json()["error"]["param"] == "slo"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_i5_health_turns_red_when_a_worker_is_lost(server: Server, fleet: FakeFleet) -> None:
    url = f"http://127.0.0.1:{server.serve(grpc_port=None).http_port}"
    assert server.health().is_ready
    fleet.decode.die("fell over")
    assert wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
    assert "fell over" in str(httpx.get(f"{url}/health").json()["reasons"])


def test_a_port_that_is_taken_is_an_os_error(server: Server) -> None:
    taken = server.serve()
    for ports in ({"http_port": taken.http_port}, {"grpc_port": taken.grpc_port}):
        with pytest.raises(OSError, match="cannot listen"):
            server.serve(**ports)  # type: ignore[arg-type]
    assert server.generate("a", max_tokens=1)[0].text == "b"


def test_close_lets_running_requests_end(model: Model, deployment: DeploymentConfig) -> None:
    fleet = FakeFleet(step_seconds=0.005)
    server = Server(model, deployment, lambda: fleet)
    server.start()
    url = f"http://127.0.0.1:{server.serve(grpc_port=None).http_port}"
    body = {"prompt": "a", "max_tokens": 30, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        closing = threading.Thread(target=server.close)
        closing.start()
        events = [line for line in lines if line]
    closing.join(5.0)
    assert len(events) == 30 and events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert fleet.num_closed == 1


def test_close_ends_what_does_not_end_by_itself(model: Model, deployment: DeploymentConfig) -> None:
    fleet = FakeFleet(step_seconds=0.02)
    server = Server(model, deployment, lambda: fleet)
    server.start()
    url = f"http://127.0.0.1:{server.serve(grpc_port=None).http_port}"
    caught: list[Exception] = []

    def wait() -> None:
        try:
            server.generate([3], max_tokens=200)
        except RequestCancelledError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    body = {"prompt": [3], "max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        start = time.monotonic()
        server.close(drain_seconds=0.1)
        assert time.monotonic() - start < 3.0
        events = [line for line in lines if line]
    waiting.join(1.0)
    assert '"error"' in events[-2] and events[-1] == "data: [DONE]"
    assert len(caught) == 1
    assert fleet.num_held == 0


def test_nothing_is_left_after_close(
    model: Model, deployment: DeploymentConfig, fleet: FakeFleet
) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with Server(model, deployment, lambda: fleet) as server:
        server.serve(grpc_port=None)
        server.generate("a", max_tokens=1)
    assert {thread.name for thread in threading.enumerate()} <= before
    assert fleet.num_closed == 1
    server.close()
    for call in (lambda: server.generate("a"), server.start, lambda: server.serve()):
        with pytest.raises(RuntimeError):
            call()


def test_the_context_is_what_the_pool_can_hold(model: Model, deployment: DeploymentConfig) -> None:
    fleet = FakeFleet()
    fleet.decode.num_pages = 4
    with Server(model, deployment, lambda: fleet) as server:
        assert server.max_model_len == 4 * 16
        with pytest.raises(RequestError, match="holds 64 tokens"):
            server.generate("x" * 70)


def test_a_failed_start_closes_the_fleet(
    model: Model, deployment: DeploymentConfig, fleet: FakeFleet
) -> None:
    fleet.prefill = fleet.decode  # two workers of one name
    server = Server(model, deployment, lambda: fleet)
    with pytest.raises(ValueError, match="two workers"):
        server.start()
    assert fleet.num_closed == 1


def test_wait_for_signal_returns_it_and_restores_the_handlers(server: Server) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        assert server.wait_for_signal() == number
    assert signal.getsignal(signal.SIGTERM) is before


def test_launch_checks_the_pair_before_anything_starts(
    model: Model, deployment: DeploymentConfig
) -> None:
    with pytest.raises(ConfigError, match=r"engine.prefil_chunk.*is not a key of \[engine\]"):
        launch(model, deployment, engine={"prefil_chunk": 5})
    uneven = replace(deployment.workers[0], devices=(0, 1, 2), tensor=3)
    with pytest.raises(ConfigError, match="does not divide"):
        launch(model, replace(deployment, workers=(uneven, *deployment.workers[1:])))
    server = launch(model, deployment, engine={"max_model_len": 64})
    assert server.max_model_len == 64 and server.model_name == "tiny"


def test_public_names_are_the_documented_ones() -> None:
    assert list(jpd.__all__) == [
        "ChatOptions",
        "ConfigError",
        "DeadlineError",
        "Endpoints",
        "GenerateOptions",
        "Generation",
        "JpdError",
        "ModelNotFoundError",
        "OverloadedError",
        "Problem",
        "RequestCancelledError",
        "RequestError",
        "Server",
        "Session",
        "TextDelta",
        "Timeline",
        "TokenLogprobs",
        "ToolCallDelta",
        "TransferError",
        "WorkerError",
        "WorkerLostError",
        "launch",
    ]
    for name in jpd.__all__:
        assert getattr(jpd, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = jpd.nonsense


def test_jpd_launch_is_the_function_though_a_subpackage_has_its_name() -> None:
    script = (
        "import jpd.launch.inprocess, jpd.api\n"
        "from jpd.launch.inprocess import launch_workers\n"
        "assert jpd.launch is jpd.api.launch, jpd.launch"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)


def test_import_jpd_loads_no_jax() -> None:
    script = (
        "import sys, jpd\n"
        "jpd.RequestError, jpd.Timeline\n"
        "assert not {'jax', 'flax', 'numpy', 'fastapi', 'grpc'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
