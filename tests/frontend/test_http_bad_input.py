"""Raw HTTP that no well-behaved client sends: always OpenAI's error object, never a dead server."""

import json
import logging
from collections.abc import Iterator

import httpx
import pytest

from jpd.frontend.operations import HealthReport
from jpd.frontend.refusals import NEUTRAL_VALUES
from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import (
    BOS,
    EOS,
    VOCAB_SIZE,
    FakeRouter,
    make_model,
    make_tokenizer,
)

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


@pytest.mark.parametrize(
    ("template", "words"),
    [(None, "no chat template"), ("{% for %}", "is broken"), ("{{ nothing() }}", "nothing")],
)
def test_f11_without_a_template_that_works_only_chat_is_refused(
    open_doors: Opened, template: str | None, words: str
) -> None:
    doors = open_doors(make_model(make_tokenizer(template)))
    chat = '{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'
    assert words in str(refused(doors, CHAT, chat)["message"])
    assert post(doors, COMPLETIONS, '{"model": "tiny", "prompt": "hi"}').status_code == 200


@pytest.mark.parametrize(
    "body",
    ["", "{", "{'a': 1}", '{"prompt": "a",}', "[]", '"text"', "null", "5", "\x00", "[" * 100_000],
)
def test_malformed_json(doors: Doors, body: str) -> None:
    assert error_of(post(doors, COMPLETIONS, body))["type"] == "invalid_request_error"


def test_huge_integers_are_not_a_server_error(doors: Doors) -> None:
    body = '{"prompt": "a", "max_tokens": ' + "9" * 5000 + "}"
    error_of(post(doors, COMPLETIONS, body))


def test_body_that_is_not_utf8(doors: Doors) -> None:
    error_of(post(doors, COMPLETIONS, b'{"prompt": "\xff\xfe"}'))


def test_wrong_content_type_is_told(doors: Doors) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = doors.http.post(COMPLETIONS, content='{"prompt": "a"}', headers=headers)
    assert "application/json" in str(error_of(response)["message"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ("", "prompt"),
        ('"prompt": null', "prompt"),
        ('"prompt": ""', "prompt"),
        ('"prompt": []', "prompt"),
        ('"prompt": [""]', "prompt[0]"),
        ('"prompt": [[]]', "prompt[0]"),
        ('"prompt": ["ok", ""]', "prompt[1]"),
        ('"prompt": ["ok", [1]], "echo": 5', "echo"),
        ('"prompt": [1, "a"]', "prompt[1]"),
        ('"prompt": [1.5]', "prompt[0]"),
        ('"prompt": [true]', "prompt[0]"),
        ('"prompt": {"a": 1}', "prompt"),
        ('"prompt": 7', "prompt"),
        ('"prompt": [-1]', "prompt[0]"),
        (f'"prompt": [{VOCAB_SIZE}]', "prompt[0]"),
        ('"prompt": [[1], [2147483648]]', "prompt[1][0]"),
        ('"prompt": "a", "model": 5', "model"),
        ('"prompt": "a", "n": 0', "n"),
        ('"prompt": "a", "n": "2"', "n"),
        ('"prompt": "a", "n": 100000', "n"),
        ('"prompt": "a", "stream_options": {"include_usage": 1}', "stream_options.include_usage"),
        ('"prompt": "a", "session_id": ""', "session_id"),
        ('"prompt": "a", "session_id": 5', "session_id"),
        ('"prompt": "a", "priority": 1.5', "priority"),
    ],
)
def test_e10_and_e14_fields_that_are_refused(doors: Doors, fields: str, param: str) -> None:
    assert refused(doors, COMPLETIONS, "{" + (fields or '"model": "tiny"') + "}")["param"] == param


@pytest.mark.parametrize("value", ["0", "-1", '"5"', "1.5", "true", "1e9", "[]", "600"])
@pytest.mark.parametrize("name", ["max_tokens", "min_tokens"])
def test_e11_token_counts(doors: Doors, name: str, value: str) -> None:
    if (name, value) == ("min_tokens", "0"):
        value = "-0.5"  # 0 is the default
    body = f'{{"prompt": "a", "max_tokens": 500, "{name}": {value}}}'
    assert refused(doors, COMPLETIONS, body)["param"] == name


def test_e11_null_is_the_default(doors: Doors) -> None:
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stream")
    body = {"prompt": "hi"} | dict.fromkeys(names)
    answer = post(doors, COMPLETIONS, json.dumps(body)).json()
    assert answer["choices"][0]["text"] == "hi"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-1", "1e308", '"0.5"', "true"])
@pytest.mark.parametrize(
    "name",
    [
        *("temperature", "top_p", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    ],
)
def test_e13_numbers_that_are_none(doors: Doors, name: str, value: str) -> None:
    if "penalty" in name and value == "-1":
        value = "-2.5"
    body = f'{{"prompt": "a", "{name}": {value}}}'
    assert refused(doors, COMPLETIONS, body)["param"] == name


@pytest.mark.parametrize("value", ['""', '[""]', '["", " END"]', "5", "[5]"])
def test_e03_stops(doors: Doors, value: str) -> None:
    error = refused(doors, COMPLETIONS, f'{{"prompt": "a", "stop": {value}}}')
    assert error["param"] == "stop"


def test_e03_a_stop_that_is_no_text_is_told_what_it_should_be(doors: Doors) -> None:
    message = refused(doors, COMPLETIONS, '{"prompt": "a", "stop": 5}')["message"]
    assert message == "stop = 5: must be a string or a list of strings"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ('{"-1": 1}', "'-1'"),
        (f'{{"{VOCAB_SIZE}": 1}}', str(VOCAB_SIZE)),
        (f'{{"{VOCAB_SIZE + 10}": 1}}', str(VOCAB_SIZE + 10)),
        ('{"2147483648": 1}', "2147483648"),
        ('{"a": 1}', "'a'"),
        ('{"05": 1}', "'05'"),
        ('{"5": 101}', "token 5"),
        ('{"5": NaN}', "token 5"),
        ('{"5": "1"}', "token 5"),
        ("[5]", "[5]"),
        (json.dumps(dict.fromkeys(map(str, range(301)), 1)), "301 entries"),
    ],
)
def test_e14_logit_bias(doors: Doors, value: str, told: str) -> None:
    error = refused(doors, COMPLETIONS, f'{{"prompt": "a", "logit_bias": {value}}}')
    assert error["param"] == "logit_bias" and told in str(error["message"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, '"logprobs": 21', "logprobs"),
        (COMPLETIONS, '"logprobs": -1', "logprobs"),
        (COMPLETIONS, '"logprobs": true', "logprobs"),
        (COMPLETIONS, '"top_logprobs": 2', "top_logprobs"),
        (COMPLETIONS, '"prompt_logprobs": 21', "prompt_logprobs"),
        (CHAT, '"logprobs": 2', "logprobs"),
        (CHAT, '"top_logprobs": 2', "top_logprobs"),
        (CHAT, '"logprobs": true, "top_logprobs": 21', "top_logprobs"),
        (CHAT, '"logprobs": true, "top_logprobs": -1', "top_logprobs"),
        (CHAT, '"max_completion_tokens": 0', "max_completion_tokens"),
        (CHAT, '"max_completion_tokens": 5000', "max_completion_tokens"),
        (CHAT, '"max_tokens": 0', "max_tokens"),
    ],
)
def test_what_is_asked_for_is_named_as_it_was_asked(
    doors: Doors, path: str, fields: str, param: str
) -> None:
    prompt = '"prompt": "a"' if path == COMPLETIONS else json.dumps(chat("a"))[1:-1]
    assert refused(doors, path, f"{{{prompt}, {fields}}}")["param"] == param


def test_every_refusal_is_counted_once(doors: Doors) -> None:
    bodies = ('{"prompt": ""}', '{"prompt": "a", "n": 0}', "{", '{"prompt": "a", "n": "2"}')
    for count, body in enumerate(bodies, start=doors.num_refusals + 1):
        error_of(post(doors, COMPLETIONS, body))
        assert doors.num_refusals == count
    error_of(post(doors, "/tokenize", '{"prompt": 5}'))
    assert post(doors, COMPLETIONS, '{"prompt": "a"}').status_code == 200
    assert doors.num_refusals == count


@pytest.mark.parametrize("value", ["[-1]", f"[{VOCAB_SIZE}]", "[2147483648]", '["1"]', '"1"'])
def test_e14_stop_token_ids(doors: Doors, value: str) -> None:
    error = refused(doors, COMPLETIONS, f'{{"prompt": "a", "stop_token_ids": {value}}}')
    assert str(error["param"]).startswith("stop_token_ids")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_e15_prompt_longer_than_the_context(doors: Doors, path: str) -> None:
    long = "x" * 600
    prompt = {"prompt": long} if path == COMPLETIONS else chat(long)
    error = refused(doors, path, json.dumps(prompt))
    assert "context holds 512 tokens" in str(error["message"])
    assert len(str(error["message"])) < 300


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_e15_prompt_and_output_longer_than_the_context(doors: Doors, path: str) -> None:
    prompt = {"prompt": "x" * 300} if path == COMPLETIONS else chat("x" * 300)
    error = refused(doors, path, json.dumps(prompt | {"max_tokens": 300}))
    assert error["param"] == "max_tokens"


@pytest.mark.parametrize("text", ["\\ud83d", "\\ude00 x", "a\\udfffb"])
def test_e17_lone_surrogates(doors: Doors, text: str) -> None:
    refused(doors, COMPLETIONS, f'{{"prompt": "{text}"}}')
    refused(doors, CHAT, f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}')
    refused(doors, COMPLETIONS, f'{{"prompt": "a", "stop": "{text}"}}')
    refused(doors, COMPLETIONS, f'{{"prompt": "a", "session_id": "{text}"}}')


@pytest.mark.parametrize("text", ["\\ud83d\\ude00", "a\\u0000b", "\\ufeffx", "é" + "\u0301" * 100])
def test_e17_odd_but_valid_text(doors: Doors, text: str) -> None:
    response = post(doors, COMPLETIONS, f'{{"prompt": "{text}", "max_tokens": 300}}')
    assert response.json()["choices"][0]["text"] == json.loads(f'"{text}"')


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("suffix", "x"),
        ("functions", [{"name": "f"}]),
        ("guided_grammar", "start: x"),
        ("use_beam_search", True),
        ("truncate_prompt_tokens", 0),
        ("reasoning_effort", "low"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(
    doors: Doors, name: str, value: object
) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, chat("a"))):
        error = refused(doors, path, json.dumps(prompt | {name: value}))
        assert error["param"] == name and "not supported" in str(error["message"])


def test_the_same_fields_pass_at_their_neutral_values(doors: Doors) -> None:
    for last in (False, True):
        extra = {name: values[-1 if last else 0] for name, values in NEUTRAL_VALUES.items()}
        del extra["echo"]
        response = post(doors, COMPLETIONS, json.dumps({"prompt": "hi"} | extra))
        assert response.json()["choices"][0]["text"] == "hi"


def test_unknown_fields_are_ignored_and_logged(
    doors: Doors, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "jpd.frontend"):
        body = json.dumps({"prompt": "hi", "user": "me", "frobnicate\n" + "x" * 100: 1})
        assert post(doors, COMPLETIONS, body).status_code == 200
    [record] = [record for record in caplog.records if record.name == "jpd.frontend"]
    assert "frobnicate\\n" in record.getMessage() and len(record.getMessage()) < 150


def test_a_long_unknown_message_key_is_not_echoed_whole(doors: Doors) -> None:
    message = {"role": "user", "content": "a", "k" * 5000: 1}
    error = error_of(post(doors, CHAT, json.dumps({"messages": [message]})))
    assert len(json.dumps(error)) < 1000


def chat(text: object, role: object = "user") -> dict[str, object]:
    return {"messages": [{"role": role, "content": text}]}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        ([{"role": "tool", "content": "a"}], "messages[0].tool_call_id"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "assistant", "content": "a", "tool_calls": [{}]}],
            "messages[0].tool_calls[0]",
        ),
    ],
)
def test_e26_messages_that_are_refused(doors: Doors, messages: object, param: str) -> None:
    assert refused(doors, CHAT, json.dumps({"messages": messages}))["param"] == param


def test_e26_text_parts_are_joined_and_roles_kept(doors: Doors) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": None, "refusal": None},
    ]
    assert post(doors, CHAT, json.dumps({"messages": messages})).status_code == 200
    [request] = doors.router.requests
    prompt = bytes(request.prompt_token_ids[1:]).decode()
    assert prompt == "<system>d\n<user>ab\n<assistant>\n<assistant>"


def test_e26_a_trailing_assistant_turn_without_a_generation_prompt(doors: Doors) -> None:
    body = chat("so", "assistant") | {"add_generation_prompt": False}
    assert post(doors, CHAT, json.dumps(body)).status_code == 200
    [request] = doors.router.requests
    assert request.prompt_token_ids == (BOS, *b"<assistant>so\n")


def test_f11_template_that_refuses_is_a_400(open_doors: Opened) -> None:
    templates = (
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{{ messages[0].content + 1 }}",
        None,
    )
    for template in templates:
        doors = open_doors(make_model(make_tokenizer(template)))
        error = error_of(post(doors, CHAT, json.dumps(chat("hi"))))
        assert error["param"] == "messages"
        assert post(doors, COMPLETIONS, '{"prompt": "hi"}').status_code == 200


def test_max_completion_tokens_must_agree_with_max_tokens(doors: Doors) -> None:
    body = chat("a") | {"max_tokens": 5, "max_completion_tokens": 6}
    assert refused(doors, CHAT, json.dumps(body))["param"] == "max_completion_tokens"
    body = chat("abcdefgh") | {"max_tokens": 5, "max_completion_tokens": 5}
    assert post(doors, CHAT, json.dumps(body)).json()["usage"]["completion_tokens"] == 5


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


def test_i4_bad_requests_do_not_touch_a_neighbour(doors: Doors) -> None:
    doors.router = FakeRouter(script=lambda request: [97] * 50, delay_seconds=0.002)
    with doors.http.stream(
        "POST", COMPLETIONS, json={"prompt": "a", "max_tokens": 50, "stream": True}
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        for body in ("{", '{"prompt": ""}', '{"prompt": "a", "temperature": NaN}'):
            error_of(post(doors, COMPLETIONS, body))
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) == 50 + 1 - 1
