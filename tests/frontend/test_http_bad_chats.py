"""Chats that cannot be: messages, templates, fields of chats alone."""

import json

import pytest

from tests.frontend.conftest import Doors, Opened
from tests.frontend.fake_router import BOS, make_model, make_tokenizer
from tests.frontend.raw_http import CHAT, COMPLETIONS, chat, error_of, post, refused


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


def test_a_long_unknown_message_key_is_not_echoed_whole(doors: Doors) -> None:
    message = {"role": "user", "content": "a", "k" * 5000: 1}
    error = error_of(post(doors, CHAT, json.dumps({"messages": [message]})))
    assert len(json.dumps(error)) < 1000


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
