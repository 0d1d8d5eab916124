"""Around a completion over HTTP: models, routes, ids, sessions, sizes, /tokenize, /health."""

import json
import logging
from collections.abc import Iterator

import pytest

from jpd.frontend.operations import HealthReport
from tests.frontend.conftest import Doors
from tests.frontend.fake_router import BOS, EOS, VOCAB_SIZE
from tests.frontend.raw_http import CHAT, COMPLETIONS, JSON, chat, error_of, post


def test_unknown_model(doors: Doors) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, chat("a"))):
        error = error_of(post(doors, path, json.dumps(prompt | {"model": "gpt-4"})), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"


def test_unknown_route_and_method(doors: Doors) -> None:
    error_of(doors.http.post("/v1/embeddings", json={}), 404)
    error_of(doors.http.get("/" + "x" * 2000), 404)
    response = doors.http.get(COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_session_by_header_and_field(doors: Doors) -> None:
    body = json.dumps({"prompt": "a", "session_id": "s"})
    assert post(doors, COMPLETIONS, body, **{"x-session-id": "s"}).status_code == 200
    error = error_of(post(doors, COMPLETIONS, body, **{"x-session-id": "t"}))
    assert error["param"] == "session_id"
    error = error_of(post(doors, COMPLETIONS, '{"prompt": "a"}', **{"x-session-id": "x" * 300}))
    assert error["param"] == "session_id"


def test_stream_options_need_a_stream(doors: Doors) -> None:
    body = '{"prompt": "a", "stream_options": {"include_usage": true}}'
    assert error_of(post(doors, COMPLETIONS, body))["param"] == "stream_options"
    body = '{"prompt": "a", "stream": true, "stream_options": {"continuous_usage_stats": true}}'
    error = error_of(post(doors, COMPLETIONS, body))
    assert error["param"] == "stream_options.continuous_usage_stats"


def test_body_above_the_limit(doors: Doors) -> None:
    body = json.dumps({"prompt": "x" * (1 << 20)})
    assert error_of(post(doors, COMPLETIONS, body), 413)["code"] == "body_too_large"

    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b'{"prompt": "' + b"x" * (1 << 16)

    response = doors.http.post(COMPLETIONS, content=chunks(), headers=JSON)
    error_of(response, 413)
    assert post(doors, COMPLETIONS, '{"prompt": "hi"}').status_code == 200


@pytest.mark.field_report("E25")
def test_e12_and_e25_client_request_ids_are_not_ours(
    doors: Doors, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "jpd.http"):
        for client_id in ("same", "same", "x" * 5000, "a\tb"):
            response = post(doors, COMPLETIONS, '{"prompt": "a"}', **{"x-request-id": client_id})
            assert response.status_code == 200
            assert response.headers["x-request-id"] not in ("same", client_id)
    ids = {request.request_id for request in doors.router.requests}
    assert len(ids) == 4
    assert max(len(record.getMessage()) for record in caplog.records) < 400


def test_tokenize_and_detokenize(doors: Doors) -> None:
    answer = doors.http.post("/tokenize", json={"prompt": "hé"}).json()
    assert answer == {"count": 4, "max_model_len": 512, "tokens": [BOS, *"hé".encode()]}
    answer = doors.http.post("/tokenize", json={"prompt": "h", "add_special_tokens": False})
    assert answer.json()["tokens"] == [104]
    answer = doors.http.post("/tokenize", json=chat("hi"))
    assert answer.json()["tokens"] == [BOS, *b"<user>hi\n<assistant>"]
    answer = doors.http.post("/detokenize", json={"tokens": [BOS, 104, EOS]})
    assert answer.json() == {"prompt": "<bos>h<eos>"}
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}),
        ("/detokenize", {"tokens": [1.5]}),
    ):
        error_of(doors.http.post(path, json=body))


def test_f12_tokenize_gives_the_ids_that_chat_uses(doors: Doors) -> None:
    tokens = doors.http.post("/tokenize", json=chat("hi")).json()["tokens"]
    post(doors, CHAT, json.dumps(chat("hi")))
    assert list(doors.router.requests[0].prompt_token_ids) == tokens


def test_health_version_metrics_and_docs(doors: Doors) -> None:
    response = doors.http.get("/health")
    assert response.status_code == 200
    assert response.json()["status"] == "ok" and response.json()["reasons"] == []
    doors.health = HealthReport(False, "unhealthy", ("decode-0: fell over",))
    response = doors.http.get("/health")
    assert response.status_code == 503
    assert response.json()["reasons"] == ["decode-0: fell over"]
    doors.health = HealthReport(True, "degraded", ("1 compilation after ready",))
    assert doors.http.get("/health").status_code == 200
    assert list(doors.http.get("/version").json()) == ["version"]
    response = doors.http.get("/metrics")
    assert response.text == "jpd:up 1\n"
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    paths = doors.http.get("/openapi.json").json()["paths"]
    assert {COMPLETIONS, CHAT, "/v1/models", "/health", "/tokenize"} <= set(paths)
    assert all("422" not in verb["responses"] for path in paths.values() for verb in path.values())
