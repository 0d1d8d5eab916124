"""Log lines as JSON: one object a line, whatever stands in it."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from jpd.log_lines import JsonLines
from tests.frontend.conftest import Doors


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("jpd")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_request_is_one_object_with_its_id(doors: Doors, lines: io.StringIO) -> None:
    reply = doors.http.get("/a\u2028b", headers={"x-request-id": 'me"'})
    [line] = [line for line in lines.getvalue().splitlines() if '"/a' in line]
    found = json.loads(line)
    assert found["request_id"] == reply.headers["x-request-id"]
    assert (found["status"], found["method"], found["client_id"]) == (404, "GET", 'me"')
    assert found["path"] == "/a\u2028b" and found["milliseconds"] >= 0
    assert found["logger"] == "jpd.http" and found["level"] == "INFO"
    assert found["time"].endswith("+00:00")


def test_a_traceback_stays_on_its_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("jpd.x").exception("it\nbroke")
    [line] = lines.getvalue().splitlines()
    found = json.loads(line)
    assert found["message"] == "it\nbroke" and "two\nlines" in found["traceback"]
