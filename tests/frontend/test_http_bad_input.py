"""Raw HTTP that no well-behaved client sends: always OpenAI's error object, never a dead server."""

import json
import logging

import pytest

from jpd.frontend.refusals import NEUTRAL_VALUES
from tests.frontend.conftest import Doors
from tests.frontend.fake_router import VOCAB_SIZE, FakeRouter
from tests.frontend.raw_http import CHAT, COMPLETIONS, chat, error_of, post, refused


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
