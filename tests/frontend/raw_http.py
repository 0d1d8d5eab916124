"""Raw HTTP for tests of the doors: bodies as bytes, and what every refusal must be."""

import json

import httpx
import pytest

from tests.frontend.conftest import Doors

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def post(doors: Doors, path: str, body: bytes | str, **headers: str) -> httpx.Response:
    content = body.encode() if isinstance(body, str) else body
    return doors.http.post(path, content=content, headers={**JSON, **headers})


def error_of(response: httpx.Response, status: int = 400) -> dict[str, str | None]:
    """The error object, after checking that it is one and that the server lives on."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.text, parse_constant=lambda name: pytest.fail(name))
    assert list(body) == ["error"]
    error: dict[str, str | None] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def refused(doors: Doors, path: str, body: str, **headers: str) -> dict[str, str | None]:
    """The error of a body that must be refused alike with and without streaming."""
    errors = []
    for stream in ("false", "true"):
        response = post(doors, path, body.replace("{", f'{{"stream": {stream}, ', 1), **headers)
        errors.append(error_of(response))
    assert errors[0] == errors[1]
    assert not doors.router.requests
    return errors[0]


def chat(text: object, role: object = "user") -> dict[str, object]:
    return {"messages": [{"role": role, "content": text}]}
