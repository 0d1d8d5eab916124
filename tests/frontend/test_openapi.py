"""The published OpenAPI document is true: what it allows is taken, what it forbids is refused, each
status it tells can be had, and answers look as it says."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import jsonschema
import pytest

from jpd.errors import DeadlineError, RequestCancelledError, WorkerLostError
from jpd.frontend.door_security import DoorSecurity
from jpd.frontend.operations import HealthReport
from jpd.frontend.tool_formats import FORMATS
from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import FakeRouter, make_model, make_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ (tools or []) | length }}"
HI = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": HI},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

ODD: list[Any] = [None, True, 0, "a", -1, 1.5, "", [1], ["a"], {"a": 1}]
"""Tried in every field: what the document says of each must be what the server does."""

OF_FIELD: dict[str, list[Any]] = {
    "prompt": [["a", 1], [[1], [2]], [[]], [-1], [""], [None], [1.5], [True], ["a"] * 513],
    "tokens": [[-1], [1.5], [True], ["a"]],
    "stop": [["a"] * 16, ["a"] * 17, [""], "x" * 1024, "x" * 1025, ["a", 1]],
    "stop_token_ids": [[1] * 16, [1] * 17, [-1], [1.5]],
    "logit_bias": [{"97": 1}, {"97": 101}, {"97": "1"}, {"01": 1}, {"-1": 1}],
    "messages": [
        *(HI, [{"role": "user"}], [{"role": "nobody", "content": "a"}], [{"content": "a"}]),
        *([{"role": "user", "content": 5}], [{"role": "user", "content": "a", "kind": "b"}]),
        [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "b"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
        *([{"role": "assistant", "content": None}], [{"role": "assistant", "tool_calls": [CALL]}]),
        [{"role": "tool", "content": "a"}],
        [{"role": "tool", "content": "a", "tool_call_id": "c"}],
    ],
    "tools": [
        *([FUNCTION], [FUNCTION["function"]], [{"type": "other", "function": {"name": "f"}}]),
        [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "f", "parameters": [], "description": 5}}],
    ],
    "tool_choice": ["auto", "none", "required", FUNCTION, {"type": "function", "function": {}}],
    "response_format": [
        *({"type": "text"}, {"type": "json_object"}, {"type": "other"}, {"type": "json_schema"}),
        {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    ],
    "structured_outputs": [
        *({"json_object": True}, {"regex": "a", "choice": ["a"]}, {"choice": []}),
        *({"grammar": "a"}, {"json": "{}"}, {"json": 5}),
    ],
    "guided_json": ["{}"],
    "guided_choice": [["a", ""], ["a", "b"]],
    "stream_options": [{"include_usage": True}, {"include_usage": 1}],
}


def edges(schema: dict[str, Any]) -> list[Any]:
    """Values at the bounds a schema tells, and just beyond."""
    found: list[Any] = []
    if "minimum" in schema:
        low, high = schema["minimum"], schema["maximum"]
        found += [low, high, low - 1, high + 1]
    if "maxLength" in schema:
        found += ["x" * schema["maxLength"], "x" * (schema["maxLength"] + 1)]
    return found


NEEDS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [FUNCTION]},
    "min_tokens": {"max_tokens": 1 << 31},
}
"""What another field must be for one to mean anything."""


@pytest.fixture(scope="module")
def all_doors(open_doors: Opened) -> Doors:
    """Of a model that can do all there is, with a context that no value of ours exceeds."""
    tokenizer = make_tokenizer(TEMPLATE)
    return open_doors(make_model(tokenizer, 1 << 40, tool_format=FORMATS["hermes"]))


@pytest.fixture(scope="module")
def document(all_doors: Doors) -> dict[str, Any]:
    found: dict[str, Any] = all_doors.http.get("/openapi.json").json()
    return found


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """With what its references need beside it."""
    return schema | {"components": document["components"]}


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    return jsonschema.Draft202012Validator(resolved(document, schema))


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rpartition("/")[2]
    schema: dict[str, Any] = document["components"]["schemas"][name]
    return schema


def fields_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each field once: those that chat shares with completions are tried there."""
    seen: set[str] = set()
    for path in BODIES:
        properties = body_schema(document, path)["properties"]
        for name in properties.keys() - (seen if path == CHAT else set()):
            yield path, name, properties[name]
        seen |= properties.keys()


def is_beyond(name: str, value: Any) -> bool:
    """What depends on the model or on other fields, and so is in no schema."""
    is_token = name in ("prompt", "tokens", "stop_token_ids")
    return (
        (name == "model" and isinstance(value, str))
        or (is_token and value == [1 << 20])
        or (name == "tool_choice" and value == {"type": "function"})
        or (name == "guided_json" and value == "a")
        or (name == "guided_regex" and value == "")
    )


def test_each_field_takes_what_the_document_allows_and_nothing_else(
    all_doors: Doors, document: dict[str, Any]
) -> None:
    all_doors.router = FakeRouter(lambda request: [97])
    wrong = []
    for path, name, schema in fields_of(document):
        num_allowed, told = 0, validator(document, schema)
        is_switch = schema.get("anyOf", [{}])[0].get("type") == "boolean"
        values = ODD[:4] if is_switch else [*ODD, *edges(schema), *OF_FIELD.get(name, ())]
        for value in values:
            if is_beyond(name, value):
                continue
            body = BODIES[path] | NEEDS.get(name, {}) | {name: value}
            if path == "/tokenize" and name == "messages" and value is not None:
                del body["prompt"]
            if path == "/tokenize" and name == "prompt" and value is None:
                body["messages"] = HI
            reply = all_doors.http.post(path, json=body)
            is_allowed = told.is_valid(value)
            num_allowed += is_allowed
            if reply.status_code != (200 if is_allowed else 400):
                wrong.append((path, name, value, reply.status_code, reply.text[:200]))
            elif not is_allowed and name not in reply.json()["error"]["param"]:
                wrong.append((path, name, value, reply.text[:200]))
        assert 0 < num_allowed < len(values), name
    assert not wrong, "\n".join(map(str, wrong))


def test_required_fields_are_required(all_doors: Doors, document: dict[str, Any]) -> None:
    for path in BODIES:
        for name in body_schema(document, path).get("required", ()):
            body = {key: value for key, value in BODIES[path].items() if key != name}
            reply = all_doors.http.post(path, json=body)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == name


@pytest.fixture(scope="module")
def closed(open_doors: Opened) -> Iterator[Mapping[int, Doors]]:
    """By what they refuse a call with: doors that ask for a key, and that have their one call."""
    model = make_model(make_tokenizer())
    busy = open_doors(model, max_calls=1)
    busy.router = FakeRouter(lambda request: [97] * 500, delay_seconds=0.05)
    body = {"prompt": "a", "max_tokens": 500, "stream": True}
    with busy.http.stream("POST", COMPLETIONS, json=body):
        yield {401: open_doors(model, DoorSecurity("secret")), 429: busy}


FAULTS: dict[int, Exception] = {
    499: RequestCancelledError("the server stops"),
    500: ValueError("secret"),
    503: WorkerLostError("decode-0", "gone"),
    504: DeadlineError("too late"),
}


def provoke(
    doors: Doors, closed: Mapping[int, Doors], method: str, path: str, status: int
) -> httpx.Response:
    """An answer with this status."""
    url = path.replace("{name}", "other" if status == 404 else "tiny")
    body = None if method == "GET" else BODIES[path]
    if status in closed:
        return closed[status].http.request(method, url, json=body)
    if path == "/health":
        doors.health = HealthReport(status == 200, "ok" if status == 200 else "unhealthy")
    elif status in FAULTS:
        doors.router.error = FAULTS[status]
    elif body is not None and status == 404:
        body = body | {"model": "other"}
    elif body is not None and status == 400:
        body = {}
    elif status == 413:
        body = {"prompt": "x" * (2 << 20)}
    return doors.http.request(method, url, json=body)


def test_each_status_can_be_had_and_looks_as_told(
    all_doors: Doors, closed: Mapping[int, Doors], document: dict[str, Any]
) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert set(operation["responses"]) >= {"200"}, path
            for status, told in operation["responses"].items():
                if (path, status) == ("/activity", "200"):
                    continue  # without an end; other doors than these have it
                all_doors.router = FakeRouter()
                reply = provoke(all_doors, closed, method.upper(), path, int(status))
                assert reply.status_code == int(status), (method, path, status, reply.text)
                media_type = reply.headers["content-type"]
                [(name, content), *_] = told["content"].items()
                assert media_type == name, (path, status)
                if media_type == "application/json":
                    validator(document, content["schema"]).validate(reply.json())
                for header in told.get("headers", {}):
                    assert header in reply.headers
    all_doors.router = FakeRouter()
    with all_doors.http.stream("POST", CHAT, json=BODIES[CHAT] | {"stream": True}) as stream:
        told = document["paths"][CHAT]["post"]["responses"]["200"]["content"]
        assert stream.headers["content-type"].partition(";")[0] in told


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_the_document_leaves_open_is_told_by_the_server(
    all_doors: Doors, document: dict[str, Any], path: str
) -> None:
    """Fields that nobody named are let through, or refused by name: the document says neither."""
    assert body_schema(document, path)["additionalProperties"] is True
    for field in ("guided_grammar", "audio"):
        reply = all_doors.http.post(path, json=BODIES[path] | {field: {"a": 1}})
        assert reply.json()["error"]["param"] == field
    assert all_doors.http.post(path, json=BODIES[path] | {"user": "me"}).status_code == 200


def test_no_operation_is_without_words(document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"]["ChatBody"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["description"], path
            assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
