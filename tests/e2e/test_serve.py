"""`jpd serve` as its users meet it: the openai client, the gRPC stub, a terminal's Ctrl-C."""

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from jpd.bench.server_process import ServerFailedError, ServerProcess
from jpd.cli import main
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.e2e.conftest import RunningServer, server_environment, write_tiny_mesh

PROMPT = [5, 9, 17, 33, 65, 129, 7, 11]


def post(url: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def get(url: str, path: str) -> str:
    with urllib.request.urlopen(url + path, timeout=60) as response:
        text: bytes = response.read()
        return text.decode()


def complete(server: RunningServer, **fields: object) -> tuple[int, dict[str, Any]]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    return post(server.url, "/v1/completions", json.dumps(body).encode())


def greedy_ids(server: RunningServer) -> list[int]:
    status, answer = complete(server, return_token_ids=True)
    assert status == 200, answer
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_openai_client_streams_and_does_not(running_server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{running_server.url}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        assert model.id == running_server.address.model == "llama3"
        whole = client.completions.create(
            model=model.id, prompt=PROMPT, max_tokens=8, temperature=0
        )
        assert whole.usage is not None and whole.usage.completion_tokens == 8
        assert whole.choices[0].finish_reason == "length"
        with client.completions.create(
            model=model.id,
            prompt=PROMPT,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"include_details": True, "return_token_ids": True},
        ) as stream:
            chunks = list(stream)
    ids = [i for c in chunks for choice in c.choices for i in choice.model_extra["token_ids"]]
    assert ids == greedy_ids(running_server)
    assert chunks[-1].usage == whole.usage
    details = chunks[-2].choices[0].model_extra["details"]
    assert details["kv_bytes"] > 0 and details["path"] == ["disaggregated"]


def test_grpc_stub_gives_the_same_tokens(running_server: RunningServer) -> None:
    with grpc.insecure_channel(running_server.address.grpc) as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        request = jpd_pb2.GenerateRequest(
            token_ids=jpd_pb2.TokenIds(ids=PROMPT),
            sampling=jpd_pb2.SamplingParams(max_tokens=8, temperature=0.0),
        )
        ids = [i for response in stub.Generate(request, timeout=60) for i in response.token_ids]
    assert ids == greedy_ids(running_server)


BAD_BODIES: dict[str, bytes] = {
    name: json.dumps({"prompt": PROMPT, "max_tokens": 4, **fields}).encode()
    for name, fields in {
        "empty prompt": {"prompt": []},
        "prompt longer than the context": {"prompt": [5] * 200},
        "zero tokens": {"max_tokens": 0},
        "negative tokens": {"max_tokens": -3},
        "more tokens than the context": {"max_tokens": 1000},
        "negative temperature": {"temperature": -1},
        "temperature NaN": {"temperature": float("nan")},
        "id outside the vocabulary": {"prompt": [5, 160]},
        "negative id": {"prompt": [-1]},
        "text without a tokenizer": {"prompt": "hello"},
        "stop id outside the vocabulary": {"stop_token_ids": [160]},
    }.items()
} | {"malformed JSON": b'{"prompt": [5,', "no JSON at all": b"\xff\xfe"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", BAD_BODIES)
@pytest.mark.field_report("C15")
def test_bad_body_is_400_and_nobody_else_notices(
    running_server: RunningServer, case: str, stream: bool
) -> None:
    body = BAD_BODIES[case]
    if stream and body.endswith(b"}"):
        body = body[:-1] + b', "stream": true}'
    before = greedy_ids(running_server)
    status, answer = post(running_server.url, "/v1/completions", body)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]
    assert greedy_ids(running_server) == before


def test_unknown_model_is_404(running_server: RunningServer) -> None:
    status, answer = complete(running_server, model="gpt-17")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("sampling", "ids"),
    [
        ({"max_tokens": 0}, PROMPT),
        ({"max_tokens": -1}, PROMPT),
        ({"temperature": float("nan")}, PROMPT),
        ({"temperature": -0.5}, PROMPT),
        ({}, []),
        ({}, [160]),
        ({}, [5] * 200),
    ],
)
def test_bad_rpc_is_invalid_argument(
    running_server: RunningServer, sampling: dict[str, Any], ids: list[int]
) -> None:
    with grpc.insecure_channel(running_server.address.grpc) as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        request = jpd_pb2.GenerateRequest(
            token_ids=jpd_pb2.TokenIds(ids=ids),
            sampling=jpd_pb2.SamplingParams(**{"max_tokens": 4, **sampling}),
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=60))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_health_and_metrics_after_all_that(running_server: RunningServer) -> None:
    """Nothing was compiled after ready, whatever the tests before this one sent."""
    health = json.loads(get(running_server.url, "/health"))
    assert (health["status"], health["reasons"], health["hosts"]) == ("ok", [], {"here": "up"})
    assert [(w["name"], w["role"], w["state"]) for w in health["workers"]] == [
        ("prefill-0", "prefill", "up"),
        ("decode-0", "decode", "up"),
    ]
    metrics = get(running_server.url, "/metrics")
    assert "jpd:time_to_first_token_seconds_count" in metrics


def is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_server_and_leaves_nothing(
    repo: Path, golden_gemma3: Path, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ["--model", str(golden_gemma3), "--mesh", str(write_tiny_mesh(tmp_path))]
    timeline = tmp_path / "timeline.json"
    arguments += ["--http-port", "0", "--grpc-port", "0", "--drain-seconds", "1"]
    arguments += ["--timeline", str(timeline)]
    with ServerProcess(arguments, environment=server_environment(repo)) as server:
        server.wait_ready(120)
        server.process.send_signal(number)
        assert server.process.wait(30) == 0, server.last_words()
        assert "traceEvents" in json.loads(timeline.read_text())
        assert "Traceback" not in server.last_words()
        assert not is_group_alive(server.process.pid)


def test_server_that_cannot_start_says_why(repo: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tmp_path), "--mesh", str(write_tiny_mesh(tmp_path))]
    with ServerProcess(arguments, environment=server_environment(repo)) as server:
        with pytest.raises(ServerFailedError, match=r"status 2[\s\S]*config\.json"):
            server.wait_ready(60)
        assert "Traceback" not in server.last_words()


def test_timeline_that_cannot_be_written_is_exit_2_at_once(tmp_path: Path) -> None:
    arguments = ["serve", "--model", str(tmp_path), "--mesh", "1p1d-cpu"]
    arguments += ["--http-port", "0", "--grpc-port", "0", "--timeline", str(tmp_path)]
    assert main(arguments) == 2


def test_port_that_is_taken_is_exit_2(
    repo: Path, tmp_path: Path, golden_llama3: Path, running_server: RunningServer
) -> None:
    taken = running_server.url.rpartition(":")[2]
    arguments = ["--model", str(golden_llama3), "--mesh", str(write_tiny_mesh(tmp_path))]
    arguments += ["--http-port", taken, "--grpc-port", "0"]
    with ServerProcess(arguments, environment=server_environment(repo)) as server:
        with pytest.raises(ServerFailedError, match=rf"status 2[\s\S]*{taken}"):
            server.wait_ready(120)
