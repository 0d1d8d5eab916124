"""Log lines as JSON: one object a line, whatever stands in it."""

import asyncio
import io
import json
import logging
import time
from collections.abc import Iterator

import grpc
import pytest

from jpd.log_lines import JsonLines, PlainLines, line_of_host, start_logging, wants_json
from jpd.rpc import jpd_pb2, jpd_pb2_grpc
from tests.frontend.conftest import Doors
from tests.support.captured_log import captured_log


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    with captured_log(JsonLines(), logging.INFO) as stream:
        yield stream


def wait_for_line(lines: io.StringIO, text: str) -> str:
    """The only line with `text`; it is written once the answer has been sent."""
    end = time.monotonic() + 10.0
    while not (found := [line for line in lines.getvalue().splitlines() if text in line]):
        assert time.monotonic() < end, f"no line has {text}"
        time.sleep(0.005)
    [line] = found
    return line


def test_a_request_is_one_object_with_its_id(doors: Doors, lines: io.StringIO) -> None:
    reply = doors.http.get("/a\u2028b", headers={"x-request-id": 'me"'})
    found = json.loads(wait_for_line(lines, '"/a'))
    assert found["request_id"] == reply.headers["x-request-id"]
    assert (found["status"], found["method"], found["client_id"]) == (404, "GET", 'me"')
    assert found["path"] == "/a\u2028b" and found["milliseconds"] >= 0
    assert found["logger"] == "jpd.http" and found["level"] == "INFO"
    assert found["time"].endswith("+00:00")


def test_a_grpc_call_has_its_line_under_the_id_of_its_trailers(
    doors: Doors, lines: io.StringIO
) -> None:
    with grpc.insecure_channel(doors.grpc_address) as channel:
        stub = jpd_pb2_grpc.JpdStub(channel)
        good = stub.Generate(jpd_pb2.GenerateRequest(text="ab"), timeout=20)
        assert list(good)
        bad = stub.Generate(jpd_pb2.GenerateRequest(text="ab", n=1000), timeout=20)
        with pytest.raises(grpc.RpcError):
            list(bad)
        stub.Tokenize(jpd_pb2.TokenizeRequest(text="ab"), timeout=20)
        doors.router.gate = asyncio.Semaphore(0)
        left = stub.Generate(jpd_pb2.GenerateRequest(text="left"), timeout=20)
        tokenize = json.loads(wait_for_line(lines, "Tokenize"))
        end = time.monotonic() + 10.0
        while not doors.router.num_running:  # a call that has not arrived leaves no line
            assert time.monotonic() < end
            time.sleep(0.005)
        left.cancel()
        gone = json.loads(wait_for_line(lines, "client gone"))
    assert (tokenize["status"], gone["method"]) == ("OK", "Generate")
    for call, status in ((good, "OK"), (bad, "INVALID_ARGUMENT")):
        found = json.loads(wait_for_line(lines, f"Generate {status}"))
        assert found["request_id"] == dict(call.trailing_metadata())["jpd-request-id"]
        assert (found["method"], found["status"]) == ("Generate", status)


def test_a_traceback_stays_on_its_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("jpd.x").exception("it\nbroke")
    [line] = lines.getvalue().splitlines()
    found = json.loads(line)
    assert found["message"] == "it\nbroke" and "two\nlines" in found["traceback"]


@pytest.fixture
def plain() -> Iterator[io.StringIO]:
    with captured_log(PlainLines(), logging.INFO) as stream:
        yield stream


def test_nothing_begins_a_line_of_its_own_in_plain_logs_either(plain: io.StringIO) -> None:
    forged = "x\n2026-01-01 INFO jpd: all is well\x1b[2J\u2028é"
    logging.getLogger("jpd.x").warning("path %s", forged)
    try:
        raise ValueError(forged)
    except ValueError:
        logging.getLogger("jpd.x").exception("it broke")
    first, second, *traceback = plain.getvalue().split("\n")[:-1]
    assert first.endswith(r"path x\n2026-01-01 INFO jpd: all is well\x1b[2J\u2028é")
    assert second.endswith("ERROR jpd.x: it broke")
    assert all(line.startswith("    ") and line.isprintable() for line in traceback)
    assert any("all is well" in line for line in traceback)


def test_lines_of_hosts_have_their_name() -> None:
    assert line_of_host("node-a", "2026 INFO x: y", as_json=False) == "node-a | 2026 INFO x: y"
    told = {"level": "ERROR", "logger": "jpd.x", "message": "it broke"}
    assert json.loads(line_of_host("node-a", json.dumps(told), as_json=True)) == {
        "host": "node-a",
        **told,
    }
    for text in ("a library wrote this", "[1]", "17", '{"half'):
        found = json.loads(line_of_host("node-a", text, as_json=True))
        assert found == {"host": "node-a", "level": "INFO", "logger": "stderr", "message": text}


def test_the_environment_tells_the_processes_of_hosts() -> None:
    before = logging.getLogger().handlers[:], logging.getLogger("jpd").level
    environment = dict[str, str]()
    try:
        start_logging(True, environment)
        assert wants_json(environment)
        start_logging(None, environment)
        [handler] = logging.getLogger().handlers
        assert isinstance(handler.formatter, JsonLines)
    finally:
        logging.getLogger().handlers[:] = before[0]
        logging.getLogger("jpd").setLevel(before[1])
