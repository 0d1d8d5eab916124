"""Bytes that no decent client sends: it is refused, or hung up on, and the next one is served."""

import json
import os
import select
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jpd.frontend.tool_formats import FORMATS
from jpd.grammar import MAX_SCHEMA_DEPTH
from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import FakeRouter, make_model, make_tokenizer
from tests.frontend.test_http_bad_input import CHAT
from tests.frontend.test_openapi import BODIES, FUNCTION, TEMPLATE
from tests.frontend.test_patience import HEAD, connect, end_of

GET = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
BODY = b'{"prompt": "a", "max_tokens": 2}'
POST = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
JSON_TYPE = {"content-type": "application/json"}

REFUSED = {
    "a method of a megabyte": b"X" * (1 << 20),
    "a path of a megabyte": b"GET /" + b"x" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
    "a header of a megabyte": GET[:-2] + b"x: " + b"x" * (1 << 20),
    "a hundred thousand headers": GET[:-2] + b"x: y\r\n" * 100_000,
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "bytes": bytes(range(256)) * 8 + b"\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500 + b"\r\n\r\n",
    "two lengths": HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",
    "a length below 0": HEAD + b"content-length: -1\r\n\r\n{}",
    "a length that is none": HEAD + b"content-length: 1e3\r\n\r\n{}",
    "a length of a thousand digits": HEAD + b"content-length: " + b"9" * 1000 + b"\r\n\r\n{}",
    "a chunk that is none": CHUNKED + b"zz\r\n",
    "a chunk of a googol": CHUNKED + b"f" * 100 + b"\r\n",
    "a coding nobody knows": HEAD + b"transfer-encoding: gzip\r\n\r\n{}",
    "a header with a NUL": GET[:-2] + b"x: \0\r\n\r\n",
}


def statuses(answers: bytes) -> list[int]:
    return [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_request(doors: Doors, what: str) -> None:
    connection = connect(doors, b"")
    try:
        connection.sendall(REFUSED[what])
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it was hung up on before it had sent all
    assert set(statuses(end_of(connection))) <= {400}
    assert not doors.router.requests
    assert doors.http.get("/health").status_code == 200


def test_pipelined_requests_are_answered_in_order(doors: Doors) -> None:
    bad = POST.replace(b'"a"', b"[5]")[: -len(BODY)] + BODY.replace(b'"a"', b"nul")
    answers = end_of(connect(doors, (GET + POST + bad) * 20 + LAST))
    assert statuses(answers) == [200, 200, 400] * 20 + [200]
    assert len(doors.router.requests) == 20


@pytest.mark.parametrize("head", [HEAD + b"content-length: 104857600\r\n\r\n", CHUNKED])
def test_a_body_of_100_megabytes_is_refused_before_it_is_sent(doors: Doors, head: bytes) -> None:
    """As soon as its length is told, or more than the limit has come."""
    part = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
    with connect(doors, head) as connection:
        num_sent = 0
        while not select.select([connection], [], [], 0.0)[0]:
            connection.sendall(part)
            num_sent += len(part)
        assert statuses(connection.recv(1 << 16)) == [413] and num_sent < 32 << 20
    assert doors.http.get("/health").status_code == 200


DEEP = [
    b"[" * 400_000,
    b'{"prompt": ' * 80_000,
    b'{"prompt": ' + b"[" * 400_000 + b"]" * 400_000 + b"}",
    b'{"prompt": "a", "messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt": "a", "logit_bias": ' + b'{"1":' * 900 + b"1" + b"}" * 901,
]


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_are_nested_too_deeply(doors: Doors, path: str) -> None:
    for content in DEEP:
        reply = doors.http.post(path, content=content, headers=JSON_TYPE)
        assert reply.status_code < 500, reply.text
        assert reply.json().get("error", {}).get("type", "invalid_request_error")
    assert doors.http.get("/health").status_code == 200


NUMBERS = ("1e400", "NaN", "-Infinity", str(2**70), "1" + "0" * 5000)


@pytest.mark.slow
def test_numbers_that_no_type_holds(doors: Doors) -> None:
    """In every field, alone and inside a list or an object."""
    document = doors.http.get("/openapi.json").json()
    for path, body in BODIES.items():
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rpartition("/")[2]
        start = json.dumps(body).removesuffix("}")
        for field in document["components"]["schemas"][name]["properties"]:
            for number in (*NUMBERS, f"[{2**70}]", '{"1": 1e400}', f'{{"{2**70}": 1}}'):
                text = f'{start}, "{field}": {number}}}'
                reply = doors.http.post(path, content=text, headers=JSON_TYPE)
                is_schema = field in ("guided_json", "tools") and number.startswith("{")
                told = (path, field, number[:30], reply.status_code, reply.text[:200])
                assert reply.status_code == 400 or is_schema, told


@pytest.fixture(scope="module")
def tool_doors(open_doors: Opened) -> Doors:
    model = make_model(make_tokenizer(TEMPLATE), 1 << 20, tool_format=FORMATS["hermes"])
    return open_doors(model)


def nested(num_levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(num_levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("choice", ["auto", "required", FUNCTION])
@pytest.mark.parametrize("num_levels", [MAX_SCHEMA_DEPTH, MAX_SCHEMA_DEPTH + 1, 300, 450])
def test_schemas_of_functions_have_so_many_levels(
    tool_doors: Doors, choice: object, num_levels: int
) -> None:
    tool_doors.router = FakeRouter(lambda request: list(b"[]"))
    function = FUNCTION | {"function": {"name": "f", "parameters": nested(num_levels)}}
    body = BODIES[CHAT] | {"tools": [function], "tool_choice": choice}
    reply = tool_doors.http.post(CHAT, json=body)
    if num_levels <= MAX_SCHEMA_DEPTH:
        assert reply.status_code == 200, reply.text
    else:
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "tools[0].function.parameters")
        assert str(MAX_SCHEMA_DEPTH) in error["message"]


@pytest.fixture
def open_files() -> Iterator[list[str]]:
    """Must be as many at the end as before, and a few."""
    before = os.listdir("/proc/self/fd")
    yield before
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 4


@pytest.mark.slow
def test_a_thousand_small_requests_leave_nothing(doors: Doors, open_files: list[str]) -> None:
    """On connections of their own, and pipelined on one."""
    for _ in range(99):
        assert httpx.get(f"{doors.url}/health").status_code == 200
    for _ in range(9):
        doors.router = FakeRouter()
        answers = end_of(connect(doors, (POST + GET) * 50 + LAST))
        assert statuses(answers) == [200] * 101
        assert doors.router.num_running == 0 and doors.router.num_finished == 50
