"""What the grammars of calls let through, and what they do not."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jpd.errors import RequestError
from jpd.frontend.job import read_sampling
from jpd.frontend.tool_fields import read_tool_request, with_grammar
from jpd.frontend.tool_formats import FORMATS
from jpd.guidance.compiler import GrammarCompiler
from tests.frontend.fake_router import EOS, EOS2, VOCAB_SIZE, make_tokenizer
from tests.frontend.tool_models import MODEL, NAMED, SCHEMA_FORMAT, TOOLS


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(make_tokenizer(), VOCAB_SIZE, (EOS, EOS2))
    yield compiler
    compiler.close()


ROM = '{"name":"weather","arguments":{"city":"Rom"}}'
NOW = '{"name":"now","arguments":{}}'


@pytest.mark.parametrize(
    ("choice", "parallel", "answer", "is_allowed"),
    [
        ("required", None, f"[{ROM},{NOW}]", True),
        ("required", False, f"[{ROM}]", True),
        ("required", False, f"[{ROM},{NOW}]", False),
        ("required", None, "[]", False),
        ("required", None, '[{"name":"other","arguments":{}}]', False),
        ("required", None, '[{"name":"now","arguments":{"city":"Rom"}}]', False),
        ("required", None, '[{"name":"weather","arguments":{"city":"Constantinople"}}]', False),
        (NAMED, None, '{"city":"Rom"}', True),
        (NAMED, None, '{"city":5}', False),
        (NAMED, None, "{}", False),
    ],
)
def test_what_grammars_of_calls_allow(
    compiler: GrammarCompiler, choice: object, parallel: bool | None, answer: str, is_allowed: bool
) -> None:
    request = read_tool_request(TOOLS, choice, parallel, MODEL)
    assert request is not None and request.grammar is not None
    compiler.check(request.grammar).result(10)
    try:
        compiler._matcher(request.grammar, [*answer.encode()])
    except RequestError:
        assert not is_allowed
    else:
        assert is_allowed


HERMES = [f"<tool_call>{one}</tool_call>" for one in (ROM, NOW)]
LLAMA = [one.replace("arguments", "parameters") for one in (ROM, NOW)]


@pytest.mark.parametrize(
    ("name", "answer", "is_allowed"),
    [
        *[(name, '{"a":5}', True) for name in ("hermes", "llama3")],
        *[(name, '{"a":"b"}', False) for name in ("hermes", "llama3")],
        *[(name, "Sunny.", False) for name in ("hermes", "llama3")],
        *[("hermes", text, True) for text in (HERMES[0], "\n".join(HERMES))],
        ("hermes", HERMES[0] + '{"a":5}', False),
        ("hermes", HERMES[0].replace("weather", "other"), False),
        ("hermes", HERMES[0].replace('"Rom"', "5"), False),
        *[("llama3", text, True) for text in (LLAMA[0], "; ".join(LLAMA))],
        ("llama3", LLAMA[0].replace('"Rom"', "5"), False),
    ],
)
def test_an_answer_of_a_format_or_calls(
    compiler: GrammarCompiler, name: str, answer: str, is_allowed: bool
) -> None:
    request = read_tool_request(
        TOOLS, "auto", None, dataclasses.replace(MODEL, tool_format=FORMATS[name])
    )
    sampling = with_grammar(read_sampling({"response_format": SCHEMA_FORMAT}), request)
    assert sampling.grammar is not None
    compiler.check(sampling.grammar).result(10)
    try:
        matcher = compiler._matcher(sampling.grammar, [*answer.encode()])
    except RequestError:
        assert not is_allowed
    else:
        assert is_allowed and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"guided_regex": "a/b+"}, "a/bb"),
        ({"guided_choice": ["yes", 'no "way"']}, 'no "way"'),
        ({"response_format": {"type": "json_object"}}, '{"x":[]}'),
    ],
)
def test_every_kind_of_answer_stands_beside_calls(
    compiler: GrammarCompiler, fields: dict[str, Any], answer: str
) -> None:
    single = with_grammar(read_sampling(fields), read_tool_request(TOOLS, None, False, MODEL))
    assert single.grammar is not None
    for text, is_allowed in ((answer, True), (HERMES[1], True), ("".join(HERMES), False)):
        try:
            matcher = compiler._matcher(single.grammar, [*text.encode()])
        except RequestError:
            assert not is_allowed
        else:
            assert is_allowed and matcher.is_accepting()
