"""What a client may send at most, and where what it sends may not get to."""

import asyncio
import io
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import grpc
import httpx
import pytest

from jpd.frontend.http_app import DEFAULT_MAX_BODY_BYTES
from jpd.frontend.job import MAX_CHOICES_PER_PROMPT, MAX_ID_CHARS, MAX_STOP_CHARS, MAX_STOPS
from jpd.frontend.operations import HealthReport, ServerFacts
from jpd.frontend.prompts import MAX_PROMPTS
from jpd.frontend.server import Endpoints, FrontendServer
from jpd.frontend.service import TextService
from jpd.log_lines import PlainLines
from jpd.request import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.frontend.conftest import Doors
from tests.frontend.fake_router import BOS, CHAT_TEMPLATE, make_model, make_tokenizer
from tests.support.captured_log import captured_log

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MAX_CALLS = 2

LIMITS = {
    "stop strings": ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop", MAX_STOPS),
    "length of a stop string": ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop", MAX_STOP_CHARS),
    "stop ids": (
        {"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)},
        "stop_token_ids",
        MAX_STOP_TOKEN_IDS,
    ),
    "biases": (
        {"logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIASES + 1)}},
        "logit_bias",
        MAX_LOGIT_BIASES,
    ),
    "choices": ({"n": MAX_CHOICES_PER_PROMPT + 1}, "n", MAX_CHOICES_PER_PROMPT),
    "prompts": ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", MAX_PROMPTS),
    "prompt tokens": ({"prompt": "a" * 600}, "prompt", 512),
    "length of a session id": (
        {"session_id": "x" * (MAX_ID_CHARS + 1)},
        "session_id",
        MAX_ID_CHARS,
    ),
}


@pytest.mark.parametrize("what", LIMITS)
def test_what_is_too_much_is_refused_with_the_limit(doors: Doors, what: str) -> None:
    fields, param, limit = LIMITS[what]
    reply = doors.http.post(COMPLETIONS, json={"prompt": "a", **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert str(limit) in error["message"]
    assert not doors.router.requests


def test_bodies_of_both_doors_have_the_same_limit(doors: Doors) -> None:
    assert DEFAULT_MAX_BODY_BYTES == 16 << 20
    with grpc.insecure_channel(doors.grpc_address) as channel:
        text = "x" * (DEFAULT_MAX_BODY_BYTES + 1)
        with pytest.raises(grpc.RpcError) as caught:
            jpd_pb2_grpc.JpdStub(channel).Tokenize(jpd_pb2.TokenizeRequest(text=text), timeout=20)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@pytest.fixture
def few(doors: Doors) -> Iterator[Endpoints]:
    """Doors that take two calls at a time, over the same scripted router."""
    service = TextService(doors, make_model(make_tokenizer()))
    facts = ServerFacts(lambda: HealthReport(True, "ok"), lambda: b"")
    server = FrontendServer(service, facts, max_calls=MAX_CALLS)
    yield doors.loop.run(server.start("127.0.0.1", 0, 0))
    doors.loop.run(server.stop(0.2))
    service.close()


class Gate:
    """Holds back the events of the scripted router."""

    def __init__(self, doors: Doors) -> None:
        self._doors, self._gate = doors, asyncio.Semaphore(0)
        doors.router.gate = self._gate

    def let_through(self, num_events: int) -> None:
        async def release() -> None:
            for _ in range(num_events):
                self._gate.release()

        self._doors.loop.run(release())


def test_calls_at_a_time_are_limited_and_looking_is_not(doors: Doors, few: Endpoints) -> None:
    gate, url = Gate(doors), f"http://127.0.0.1:{few.http_port}"
    body = {"prompt": "a", "max_tokens": 2}
    with ThreadPoolExecutor() as pool:
        running = [
            pool.submit(httpx.post, url + COMPLETIONS, json=body, timeout=20)
            for _ in range(MAX_CALLS)
        ]
        assert wait_until(lambda: doors.router.num_running == MAX_CALLS)
        refused = httpx.post(url + COMPLETIONS, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["message"].startswith("2 calls are under way")
        assert httpx.get(f"{url}/health").status_code == 200
        gate.let_through(2 * MAX_CALLS + 2)
        assert [reply.result().status_code for reply in running] == [200] * MAX_CALLS
    assert httpx.post(url + COMPLETIONS, json=body, timeout=20).status_code == 200


def test_rpcs_at_a_time_are_limited(doors: Doors, few: Endpoints) -> None:
    gate = Gate(doors)
    with grpc.insecure_channel(f"127.0.0.1:{few.grpc_port}") as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        request = jpd_pb2.GenerateRequest(text="abc", sampling={"max_tokens": 3})
        running = [stub.Generate(request, timeout=20) for _ in range(MAX_CALLS)]
        assert wait_until(lambda: doors.router.num_running == MAX_CALLS)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=20))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.let_through(3 * MAX_CALLS)
        assert [len(list(answers)) for answers in running] == [3] * MAX_CALLS


FORGED = "x\n2026-01-01 00:00:00 INFO jpd: all is well\x1b[2J\x9b\u2028{{ 7*7 }}{% raise %}%s%n"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """All that the loggers of the server write, as `jpd serve` has it."""
    with captured_log(PlainLines(), logging.DEBUG) as stream:
        yield stream


def forged_calls(doors: Doors) -> list[httpx.Response]:
    """A text that would like to be something else, in every place that takes text."""
    http, quoted = doors.http, "/" + quote(FORGED, safe="")
    chat = [{"role": "user", "content": FORGED, "name": FORGED}]
    fields = ("model", "session_id", "user", "slo", "cache_salt", "prefill_worker", FORGED)
    return [
        *(http.post(COMPLETIONS, json={"prompt": "a", name: FORGED}) for name in fields),
        http.post(COMPLETIONS, json={"prompt": FORGED, "stop": FORGED}),
        http.post(COMPLETIONS, json={"prompt": "a", "logit_bias": {FORGED: 1}}),
        http.post(COMPLETIONS, content=FORGED.encode()),
        http.post(CHAT, json={"messages": chat}),
        http.post(CHAT, json={"messages": [{"role": FORGED, "content": "a"}]}),
        http.post(CHAT, json={"messages": chat, "chat_template": "{{ 7*7 }}"}),
        http.get(quoted),
        http.get(f"/v1/models{quoted}"),
        http.get("/v1/models/..%2f..%2f..%2fetc%2fpasswd"),
        http.get("/page/..%2f..%2f..%2f..%2fetc%2fpasswd"),
        http.get("/health", headers={b"x-request-id": "é\x85all is well".encode("latin-1")}),
    ]


def test_nothing_a_client_sends_is_a_line_a_path_or_a_part_of_a_template(
    doors: Doors, log: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    replies = forged_calls(doors)
    for reply in replies:
        assert reply.status_code in (200, 400, 404), reply.text
        assert reply.headers["content-type"] == "application/json"
        assert reply.text.isascii() and "\n" not in reply.text and "root:" not in reply.text
        assert not re.search(r"[^!-~ ]", "".join(reply.headers.values()))
    for line in log.getvalue().split("\n"):
        assert not line or re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ jpd\.", line), line
        assert line.isprintable()
    assert len(log.getvalue()) > 1000
    # The template put the text where a message goes, and computed nothing of it.
    prompt = bytes(i for i in doors.router.requests[-1].prompt_token_ids if i < BOS).decode()
    assert prompt == f"<user>{FORGED}\n<assistant>" and "m.content" in CHAT_TEMPLATE


def test_texts_of_prompts_and_answers_are_in_no_line(doors: Doors, log: io.StringIO) -> None:
    secret = "correct horse battery staple"
    doors.http.post(COMPLETIONS, json={"prompt": secret, "max_tokens": 50})
    messages = [{"role": "user", "content": secret}]
    with doors.http.stream("POST", CHAT, json={"messages": messages, "stream": True}) as reply:
        assert "[DONE]" in "".join(reply.iter_text())
    doors.http.post("/tokenize", json={"prompt": secret})
    with grpc.insecure_channel(doors.grpc_address) as channel:
        list(jpd_pb2_grpc.JpdStub(channel).Generate(jpd_pb2.GenerateRequest(text=secret)))
    assert "jpd.http" in log.getvalue() and "horse" not in log.getvalue()
