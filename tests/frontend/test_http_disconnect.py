"""Clients that go away, and engines that fail in mid-stream."""

import asyncio
import json
import logging
import socket
import struct
import time
from collections.abc import Callable

import pytest

from jpd.errors import TransferError
from tests.frontend.conftest import Doors
from tests.frontend.fake_router import FakeRouter

SECONDS = 3.0
"""It takes milliseconds; a test machine may be busy."""


def endless(delay_seconds: float = 0.005) -> FakeRouter:
    return FakeRouter(script=lambda request: [97] * 500, delay_seconds=delay_seconds)


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def send(
    doors: Doors, path: str = "/v1/completions", *, buffer_bytes: int | None = None, **body: object
) -> socket.socket:
    """A raw connection with one request on it, which takes in so much before it is read."""
    fields = {"prompt": "a", "max_tokens": 400} | body
    if path.endswith("chat/completions"):
        del fields["prompt"]
    content = json.dumps(fields).encode()
    host, port = "127.0.0.1", doors.endpoints.http_port
    assert port is not None
    connection = socket.socket()
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.connect((host, port))
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def leave(connection: socket.socket, how: str) -> None:
    if how == "reset":
        linger = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
    else:
        connection.close()


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [False, True])
def test_e20_a_client_that_leaves_cancels_its_request(doors: Doors, stream: bool, how: str) -> None:
    doors.router = endless()
    connection = send(doors, stream=stream)
    assert wait_until(lambda: doors.router.num_running == 1)
    time.sleep(0.02)
    leave(connection, how)
    assert wait_until(lambda: doors.router.num_running == 0)
    assert doors.router.num_cancelled == 1 and doors.router.num_finished == 0
    connection.close()


def test_e20_also_while_no_token_has_come_yet(doors: Doors) -> None:
    for stream in (False, True):
        doors.router = endless(delay_seconds=60.0)
        connection = send(doors, stream=stream)
        assert wait_until(lambda: doors.router.num_running == 1)
        connection.close()
        assert wait_until(lambda: doors.router.num_running == 0)


def test_e20_all_choices_and_prompts_are_cancelled(doors: Doors) -> None:
    doors.router = endless()
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": messages, "n": 4}),
    ):
        connection = send(doors, path, stream=True, **body)
        assert wait_until(lambda: doors.router.num_running == 4)
        connection.close()
        assert wait_until(lambda: doors.router.num_running == 0)
    assert doors.router.num_cancelled == 8


def unread(doors: Doors, *, stream: bool) -> socket.socket:
    """A connection whose answer is more than all buffers on its way, and which nobody reads."""
    doors.router = FakeRouter(script=lambda request: [97] * 1_500_000, tokens_per_event=20_000)
    fields = {"stream": stream, "max_tokens": None, "return_token_ids": True}
    messages = [{"role": "user", "content": "hi"}]
    path = "/v1/chat/completions"
    return send(doors, path, buffer_bytes=4096, messages=messages, **fields)


def test_e20_a_client_that_stops_reading_and_leaves(doors: Doors) -> None:
    connection = unread(doors, stream=True)
    assert wait_until(lambda: doors.router.num_running == 1)
    time.sleep(0.05)
    connection.close()
    assert wait_until(lambda: doors.router.num_cancelled == 1)
    assert doors.router.num_running == 0


def test_a_left_request_is_no_error_in_the_log(
    doors: Doors, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        doors.router = endless()
        for stream in (False, True):
            connection = send(doors, stream=stream)
            assert wait_until(lambda: doors.router.num_running == 1)
            connection.close()
            assert wait_until(lambda: doors.router.num_running == 0)
        time.sleep(0.05)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    lines = [record.getMessage() for record in caplog.records if record.name == "jpd.http"]
    assert len(lines) == 2 and all("client gone" in line for line in lines)


def test_a_finished_request_is_not_cancelled_by_the_client_closing(doors: Doors) -> None:
    doors.router = FakeRouter()
    connection = send(doors, stream=True)
    data = b""
    while b"[DONE]" not in data:
        data += connection.recv(65536)
    connection.close()
    assert wait_until(lambda: doors.router.num_finished == 1)
    assert doors.router.num_cancelled == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "error", [TransferError("decode-0", "pages were lost"), ValueError("secret")]
)
def test_e18_error_in_mid_stream_is_one_event_then_done(
    doors: Doors, path: str, error: Exception
) -> None:
    doors.router = FakeRouter(lambda request: [97] * 9, error=error, error_after=5)
    body = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    body |= {"prompt": "a"} if path == "/v1/completions" else {}
    body |= {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
    start = time.monotonic()
    response = doors.http.post(path, json=body)
    assert time.monotonic() - start < SECONDS
    assert response.status_code == 200
    events = [line[len("data: ") :] for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    failures = [json.loads(event) for event in events[:-1] if "error" in json.loads(event)]
    assert failures == [json.loads(events[-2])]
    assert failures[0]["error"]["type"] == "server_error"
    assert "secret" not in response.text and "Traceback" not in response.text
    assert not any(json.loads(event).get("choices") == [] for event in events[:-1])
    assert wait_until(lambda: doors.router.num_running == 0)


def test_events_are_written_as_tokens_come(doors: Doors) -> None:
    gate = asyncio.Semaphore(0)
    doors.router = FakeRouter(lambda request: [97] * 5, gate=gate)

    async def let_one_through() -> None:
        gate.release()

    doors.loop.run(let_one_through())
    body = {"prompt": "a", "stream": True}
    with doors.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = (line for line in response.iter_lines() if line)
        for _ in range(4):  # each event is read before the next token may come
            assert '"text":"a"' in next(events)
            doors.loop.run(let_one_through())
        assert ['"text":"a"' in event for event in events] == [True, False]
