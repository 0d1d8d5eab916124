"""Every door leads to the same place: prompts to a prefill worker, and one id for a request."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from jpd.api import Server
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.support.fake_server import FakeFleet, make_tiny_model, write_deployment


class Entrances:
    """A server without devices, its doors, and the ways to ask for something there."""

    def __init__(self, server: Server, fleet: FakeFleet) -> None:
        self.server, self.fleet = server, fleet
        doors = server.serve()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{doors.http_port}", timeout=20)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{doors.grpc_port}")
        self.stub = jpd_pb2_grpc.JpdStub(self.channel)

    def close(self) -> None:
        self.http.close()
        self.channel.close()

    def post(self, path: str, **fields: object) -> httpx.Response:
        return self.http.post(path, json={"max_tokens": 3, **fields}).raise_for_status()

    def generate(self, **prompt: object) -> grpc.Call:
        call = self.stub.Generate(
            jpd_pb2.GenerateRequest(sampling={"max_tokens": 3}, **prompt), timeout=20
        )
        list(call)
        return call


@pytest.fixture(scope="module")
def entrances(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Entrances]:
    deployment = write_deployment(tmp_path_factory.mktemp("mesh"))
    router = replace(deployment.router, local_prefill_tokens=0)
    fleet = FakeFleet()
    model = make_tiny_model(repo)
    with Server(model, replace(deployment, router=router), lambda: fleet) as server:
        entrances = Entrances(server, fleet)
        yield entrances
        entrances.close()


IDS = [65, 66, 67, 68]
MESSAGES = [{"role": "user", "content": "abcd"}]
WAYS: dict[str, Callable[[Entrances], object]] = {
    "completion of text": lambda e: e.post("/v1/completions", prompt="abcd"),
    "completion of ids": lambda e: e.post("/v1/completions", prompt=IDS),
    "streamed completion": lambda e: e.post("/v1/completions", prompt="abcd", stream=True),
    "chat": lambda e: e.post("/v1/chat/completions", messages=MESSAGES),
    "streamed chat": lambda e: e.post("/v1/chat/completions", messages=MESSAGES, stream=True),
    "gRPC text": lambda e: e.generate(text="abcd"),
    "gRPC ids": lambda e: e.generate(token_ids={"ids": IDS}),
    "gRPC chat": lambda e: e.generate(chat={"messages": MESSAGES}),
    "Python": lambda e: e.server.generate("abcd", max_tokens=3),
    "Python stream": lambda e: list(e.server.stream(IDS, max_tokens=3)),
}


@pytest.mark.field_report("B12")
@pytest.mark.parametrize("way", WAYS)
def test_b12_every_door_prefills_on_a_prefill_worker(entrances: Entrances, way: str) -> None:
    prefill, decode = entrances.fleet.prefill, entrances.fleet.decode
    before = len(prefill.attempts["prefill"]), len(decode.attempts["decode"])
    WAYS[way](entrances)
    assert len(prefill.attempts["prefill"]) == before[0] + 1
    assert len(decode.attempts["decode"]) == before[1] + 1
    assert not decode.attempts["prefill"], "a decode worker prefilled"


def test_one_id_names_a_request_everywhere(entrances: Entrances) -> None:
    def last_ids(count: int) -> list[str]:
        return [trace.request_id for trace in entrances.server.trace.requests()[-count:]]

    for path, prefix in (("/v1/completions", "cmpl-"), ("/v1/chat/completions", "chatcmpl-")):
        reply = entrances.post(path, prompt="a") if "chat" not in path else None
        reply = reply or entrances.post(path, messages=MESSAGES)
        found = reply.headers["x-request-id"]
        assert reply.json()["id"] == prefix + found and last_ids(1) == [found]
    several = entrances.post("/v1/completions", prompt=["a", "b"])
    found = several.headers["x-request-id"]
    assert sorted(last_ids(2)) == [f"{found}-0", f"{found}-1"]
    trailers = dict(entrances.generate(text="a").trailing_metadata())
    assert last_ids(1) == [trailers["jpd-request-id"]]
