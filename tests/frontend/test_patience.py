"""Clients that connect and stand still are let go; those that are slow or wait are not."""

import logging
import socket
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from jpd.frontend import http_protocol
from tests.frontend.conftest import Doors
from tests.frontend.fake_router import FakeRouter
from tests.frontend.test_http_disconnect import unread, wait_until

COMPLETIONS = "/v1/completions"
NUM_HANGING = 200
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
HALVES = {
    "nothing": b"",
    "half a line": b"POST /v1/comp",
    "half a head": HEAD,
    "half a body": HEAD + b'content-length: 500\r\n\r\n{"prompt": ',
    "half a request behind a whole one": b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /hea",
}


@pytest.fixture
def hasty(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    monkeypatch.setattr(http_protocol, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(http_protocol, "TAKING_SECONDS", 0.3)
    yield doors


def connect(doors: Doors, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", doors.endpoints.http_port or 0))
    connection.sendall(data)
    return connection


def end_of(connection: socket.socket) -> bytes:
    """All that the server still sends before it ends the connection."""
    connection.settimeout(10)
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    connection.close()
    return received


def test_two_hundred_that_connect_and_hang_are_let_go(hasty: Doors) -> None:
    hanging = [
        connect(hasty, data) for _ in range(NUM_HANGING // len(HALVES)) for data in HALVES.values()
    ]
    assert httpx.get(f"{hasty.url}/health").status_code == 200
    answers = {end_of(connection)[:15] for connection in hanging}
    assert answers == {b"", b"HTTP/1.1 200 OK"}
    assert httpx.post(hasty.url + COMPLETIONS, json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_who_reads_nothing_of_an_answer_is_let_go(
    hasty: Doors, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What was made is kept for its reader. A stream is one of the calls at a time as long; a whole
    answer is not, but only a part of it fits into the kernel."""
    caplog.set_level(logging.INFO, logger="jpd.http")
    with closing(unread(hasty, stream=stream)):
        assert wait_until(lambda: any("took nothing" in line for line in caplog.messages), 20.0)
        ended = (hasty.router.num_cancelled, hasty.router.num_finished)
        assert wait_until(lambda: hasty.router.num_running == 0)
        assert ended == ((1, 0) if stream else (0, 1))


def test_who_waits_for_a_slow_answer_is_not(hasty: Doors) -> None:
    hasty.router = FakeRouter(script=lambda request: [97] * 5, delay_seconds=0.2)
    for stream in (False, True):
        body = {"prompt": "a", "max_tokens": 5, "stream": stream}
        reply = httpx.post(hasty.url + COMPLETIONS, json=body)
        assert reply.status_code == 200 and reply.text.count("a") >= 5
