"""Every door and every form of a prompt takes the same way: prefill and decode apart.

The real API, doors and router over workers without devices.
"""

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from jpd.api import Server
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.support.fake_server import FakeFleet, make_tiny_model, write_deployment

IDS = [65, 66]
MESSAGES = [{"role": "user", "content": "a"}]


@dataclass
class House:
    """A server with its doors open."""

    fleet: FakeFleet
    server: Server
    http: httpx.Client
    grpc: jpd_pb2_grpc.JpdStub

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json={"max_tokens": 3} | body)

    def call(self, **fields: object) -> list[jpd_pb2.GenerateResponse]:
        sampling = jpd_pb2.SamplingParams(max_tokens=3)
        return list(self.grpc.Generate(jpd_pb2.GenerateRequest(sampling=sampling, **fields)))


@pytest.fixture(scope="module")
def house(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[House, None, None]:
    fleet = FakeFleet(step_seconds=0.005)
    deployment = write_deployment(tmp_path_factory.mktemp("mesh"))
    with Server(make_tiny_model(repo), deployment, lambda: fleet) as server:
        ends = server.serve()
        url = f"http://{ends.host}:{ends.http_port}"
        with (
            httpx.Client(base_url=url, timeout=20) as http,
            grpc.insecure_channel(f"{ends.host}:{ends.grpc_port}") as channel,
        ):
            yield House(fleet, server, http, jpd_pb2_grpc.JpdStub(channel))


WAYS: dict[str, Callable[[House], object]] = {
    "completion of text": lambda house: house.post("completions", prompt="a"),
    "completion of ids": lambda house: house.post("completions", prompt=IDS),
    "streamed completion": lambda house: house.post("completions", prompt="a", stream=True),
    "chat": lambda house: house.post("chat/completions", messages=MESSAGES),
    "streamed chat": lambda house: house.post("chat/completions", messages=MESSAGES, stream=True),
    "gRPC text": lambda house: house.call(text="a"),
    "gRPC ids": lambda house: house.call(token_ids=jpd_pb2.TokenIds(ids=IDS)),
    "gRPC chat": lambda house: house.call(
        chat=jpd_pb2.ChatMessages(messages=[jpd_pb2.ChatMessage(role="user", content="a")])
    ),
    "Python": lambda house: house.server.generate("a", max_tokens=3),
    "Python ids": lambda house: house.server.generate([IDS], max_tokens=3),
    "streamed Python": lambda house: list(house.server.stream("a", max_tokens=3)),
}


@pytest.mark.parametrize("way", WAYS)
def test_b12_every_door_prefills_on_the_prefill_worker(house: House, way: str) -> None:
    prefill, decode = house.fleet.prefill, house.fleet.decode
    before = len(prefill.attempts["prefill"]), len(decode.attempts["decode"])
    answer = WAYS[way](house)
    assert not isinstance(answer, httpx.Response) or answer.status_code == 200
    after = len(prefill.attempts["prefill"]), len(decode.attempts["decode"])
    assert after == (before[0] + 1, before[1] + 1)
    assert not decode.attempts["prefill"]


def test_one_id_names_a_request_everywhere(house: House) -> None:
    def last_ids(count: int) -> list[str]:
        return [trace.request_id for trace in house.server.trace.requests()[-count:]]

    for prefix, reply in (
        ("cmpl-", house.post("completions", prompt="a")),
        ("chatcmpl-", house.post("chat/completions", messages=MESSAGES)),
    ):
        found = reply.headers["x-request-id"]
        assert reply.json()["id"] == prefix + found
        assert found in last_ids(2)
    several = house.post("completions", prompt=["a", "b"])
    found = several.headers["x-request-id"]
    assert sorted(last_ids(2)) == [f"{found}-0", f"{found}-1"]
    call = house.grpc.Generate(jpd_pb2.GenerateRequest(text="a", sampling={"max_tokens": 3}))
    assert list(call)
    assert last_ids(1) == [dict(call.trailing_metadata())["jpd-request-id"]]


def test_g08_ttft_is_what_the_client_sees_and_phases_stand_apart(house: House) -> None:
    prefill, decode = house.fleet.prefill, house.fleet.decode
    value = house.server.metrics.value
    names = ("time_to_first_token", "request_prefill", "kv_transfer")
    before = [value(f"jpd:{name}_seconds_sum") for name in names]
    decode.transfer_seconds, prefill.prefill_token_seconds = 0.6, 0.1
    body = {"prompt": IDS, "max_tokens": 3, "stream": True}
    try:
        start = time.monotonic()
        with house.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            seen = time.monotonic() - start
            list(lines)
    finally:
        decode.transfer_seconds, prefill.prefill_token_seconds = 0.0, 0.0
    ttft, prefilled, moved = (
        value(f"jpd:{name}_seconds_sum") - earlier
        for name, earlier in zip(names, before, strict=True)
    )
    assert 0.0 <= seen - ttft < 0.2  # its own way to the server and back
    assert 0.19 < prefilled <= ttft < 0.5 < moved  # nobody waits for the KV to see a token


UNSUPPORTED: list[dict[str, object]] = [
    {"use_beam_search": True},
    {"best_of": 3},
    {"prompt_logprobs": 10_000},
    {"logprobs": 10_000},
    {"n": 10_000},
    {"echo": True, "max_tokens": 0},
    {"logits_processors": ["x"]},
    {"allowed_token_ids": [1]},
    {"suffix": "end"},
    {"guided_grammar": "root ::= 'a'"},
    {"num_speculative_tokens": 10_000},
    {"logit_bias": {"70000": 1}},
]


def test_c15_what_is_not_supported_is_refused_and_four_streams_go_on(house: House) -> None:
    texts: list[str] = [""] * 4

    def read(place: int) -> None:
        deltas = house.server.stream(chr(97 + place), max_tokens=100, ignore_eos=True)
        for delta in deltas:
            texts[place] += delta.text

    streams = [threading.Thread(target=read, args=(place,)) for place in range(4)]
    for stream in streams:
        stream.start()
    for fields in UNSUPPORTED:
        refused = house.post("completions", prompt="a", **fields)
        assert refused.status_code == 400, (fields, refused.text)
        assert refused.json()["error"]["param"], fields
    assert any(stream.is_alive() for stream in streams), "they were to run meanwhile"
    for stream in streams:
        stream.join(20)
    alone = house.server.generate(list("abcd"), max_tokens=100, ignore_eos=True)
    assert texts == [answer.text for answer in alone] and all(texts)
