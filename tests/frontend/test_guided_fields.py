"""Every field that asks for a guided answer, right and wrong, at every door."""

import json
from collections.abc import Iterator

import grpc
import pytest

from jpd.errors import RequestError
from jpd.frontend.guided_fields import GUIDED_NAMES, read_grammar
from jpd.frontend.job import GenerateJob, read_sampling
from jpd.frontend.service import TextService
from jpd.grammar import Grammar
from jpd.guidance.compiler import GrammarCompiler
from jpd.rpc import jpd_pb2
from jpd.rpc.jpd_pb2_grpc import JpdStub
from tests.frontend.conftest import Doors
from tests.frontend.fake_router import EOS, VOCAB_SIZE, FakeRouter, make_model, make_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_JSON = '{"type":"object","properties":{"a":{"type":"integer"}}}'


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            Grammar("json_schema", AS_JSON),
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", AS_JSON)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", AS_JSON)),
        ({"guided_regex": "a*"}, Grammar("regex", "a*")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", AS_JSON)),
        ({"structured_outputs": {"regex": "a*"}}, Grammar("regex", "a*")),
        ({"structured_outputs": {"choice": ["a"], "json": None}}, Grammar("choice", '["a"]')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, Grammar("regex", "a")),
        (dict.fromkeys(GUIDED_NAMES), None),
    ],
)
def test_what_is_asked_for(fields: dict[str, object], grammar: Grammar | None) -> None:
    assert read_grammar(fields) == grammar
    assert read_sampling(fields).grammar == grammar


@pytest.mark.parametrize(
    ("fields", "named", "rule"),
    [
        ({"response_format": "json_object"}, "response_format", "object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "JSON schema",
        ),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"guided_json": "[1]"}, "guided_json", "an object"),
        ({"guided_json": {"enum": [float("nan")]}}, "guided_json", "JSON schema"),
        ({"guided_regex": 3}, "guided_regex", "regular expression"),
        ({"guided_regex": "a" * 70000}, "guided_regex", "65536"),
        ({"guided_regex": "\ud83d"}, "guided_regex", "Unicode"),
        ({"guided_choice": "ab"}, "guided_choice", "list of texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "non-empty"),
        ({"guided_choice": ["a"] * 2000}, "guided_choice", "1024"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "not supported"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "one thing"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "true"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "together"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, object], named: str, rule: str) -> None:
    with pytest.raises(RequestError, match=rule) as raised:
        read_grammar(fields)
    assert raised.value.field == named and len(str(raised.value)) < 300


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(make_tokenizer(), VOCAB_SIZE, (EOS,))
    yield compiler
    compiler.close()


def job(**fields: object) -> GenerateJob:
    return GenerateJob(prompts=("a",), sampling=read_sampling(fields))


async def test_a_grammar_is_compiled_before_anything_is_queued(compiler: GrammarCompiler) -> None:
    service = TextService(FakeRouter(), make_model(make_tokenizer()), grammars=compiler)
    prepared = await service.prepare(job(guided_regex="[ab]+"))
    assert prepared.job.sampling.grammar == Grammar("regex", "[ab]+")
    for fields, rule in (
        ({"guided_regex": "[ab"}, "unclosed"),
        ({"guided_json": {"type": "objec"}}, "objec"),
    ):
        with pytest.raises(RequestError, match=rule):
            await service.prepare(job(**fields))
    service.close()


async def test_guided_answers_need_a_tokenizer() -> None:
    service = TextService(FakeRouter(), make_model(None))
    with pytest.raises(RequestError, match="has no tokenizer") as raised:
        await service.prepare(
            GenerateJob(prompts=((5,),), sampling=read_sampling({"guided_regex": "a"}))
        )
    assert raised.value.field == "guided_regex"
    service.close()


def test_http_and_grpc_hand_the_grammar_on(doors: Doors) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        answer = doors.http.post(path, json=prompt | {"response_format": schema})
        assert answer.status_code == 200, answer.text
        assert doors.router.requests[-1].sampling.grammar == Grammar("json_schema", AS_JSON)
        answer = doors.http.post(path, json=prompt | {"guided_regex": "[a"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_regex"
    with grpc.insecure_channel(doors.grpc_address) as channel:
        for guided, grammar in (
            ({"regex": "a*"}, Grammar("regex", "a*")),
            ({"json_schema": AS_JSON}, Grammar("json_schema", AS_JSON)),
            ({"json_object": True}, Grammar("json_object")),
            ({"choice": jpd_pb2.Choices(texts=["x"])}, Grammar("choice", '["x"]')),
        ):
            request = jpd_pb2.GenerateRequest(text="hi", sampling=jpd_pb2.SamplingParams(**guided))
            list(JpdStub(channel).Generate(request, timeout=10))
            assert doors.router.requests[-1].sampling.grammar == grammar
