"""Random walks over masks give answers that match; nothing outside the mask is ever needed."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jpd.errors import RequestError
from jpd.grammar import (
    Grammar,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from jpd.guidance.compiler import MAX_REMEMBERED, GrammarCompiler
from jpd.guidance.guide import Guide, GuideState, wait_for_any
from jpd.tokenizer import HuggingFaceTokenizer
from tests.support.tiny_tokenizer import EOS_ID, VOCAB_SIZE

SCHEMA = {
    "type": "object",
    "properties": {
        "the": {"enum": ["on", "off", "other"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["the", "n"],
    "additionalProperties": False,
}


def allowed(guide: Guide) -> list[int]:
    bits = np.unpackbits(guide.mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def settle(guide: Guide) -> GuideState:
    limit = time.monotonic() + 10
    while guide.state is GuideState.PENDING:
        assert time.monotonic() < limit
        wait_for_any([guide], 1.0)
    return guide.state


def walk(guide: Guide, seed: int, max_tokens: int = 400) -> list[int]:
    """Tokens of one answer, each drawn from the mask; the end token is not among them."""
    rng, taken = np.random.default_rng(seed), list[int]()
    while settle(guide) is GuideState.OPEN:
        token_id = int(rng.choice(allowed(guide)))
        guide.advance(token_id)
        if token_id != EOS_ID:
            taken.append(token_id)
        assert len(taken) < max_tokens
    assert guide.state is GuideState.COMPLETE
    return taken


@pytest.mark.parametrize("seed", range(8))
def test_walks_over_a_schema_are_valid(
    compiler: GrammarCompiler, tokenizer: HuggingFaceTokenizer, seed: int
) -> None:
    grammar = json_schema_grammar("schema", SCHEMA)
    answer = json.loads(tokenizer.decode(walk(compiler.open(grammar), seed)))
    assert answer["the"] in ("on", "off", "other") and 0 <= answer["n"] <= 999
    assert set(answer) <= {"the", "n", "list"}
    assert all(type(item) is bool for item in answer.get("list", []))


@pytest.mark.parametrize("pattern", [r"[ab]{2,5}(the|in)[0-9]", r"^(x|yy)/\.$", r"a\$", "th\ne"])
def test_walks_over_an_expression_match(
    compiler: GrammarCompiler, tokenizer: HuggingFaceTokenizer, pattern: str
) -> None:
    for seed in range(4):
        text = tokenizer.decode(walk(compiler.open(regex_grammar("regex", pattern)), seed))
        assert re.fullmatch(pattern, text), text


def test_every_choice_is_reached_and_no_other(
    compiler: GrammarCompiler, tokenizer: HuggingFaceTokenizer
) -> None:
    choices = ["the cat", "the", 'a"b\\c\n', "thé", "{}", "é中"]
    grammar = choice_grammar("choice", choices)
    texts = {tokenizer.decode(walk(compiler.open(grammar), seed)) for seed in range(60)}
    assert texts == set(choices)


def test_a_guide_may_begin_in_the_middle(
    compiler: GrammarCompiler, tokenizer: HuggingFaceTokenizer
) -> None:
    """As an attempt does that replays what was sent: the same masks from there on."""
    grammar = json_schema_grammar("schema", SCHEMA)
    taken = walk(compiler.open(grammar), 3)
    whole = compiler.open(grammar)
    for position, token_id in enumerate(taken):
        part = compiler.open(grammar, taken[:position])
        assert settle(part) is settle(whole) is GuideState.OPEN
        assert allowed(part) == allowed(whole)
        whole.advance(token_id)
    wrong = compiler.open(grammar, [*taken[:2], 5])
    assert settle(wrong) is GuideState.FAILED and "sent so far" in str(wrong.error)


def test_end_tokens_are_allowed_where_an_answer_may_end(
    compiler: GrammarCompiler, tokenizer: HuggingFaceTokenizer
) -> None:
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    grammar = regex_grammar("regex", "ab*")
    guide, tireless = compiler.open(grammar), compiler.open(grammar, ignores_eos=True)
    for one in (guide, tireless):
        assert settle(one) is GuideState.OPEN and allowed(one) == [a]
        one.advance(a)
        settle(one)
    assert allowed(guide) == sorted([EOS_ID, b]) and allowed(tireless) == [b]
    guide.advance(EOS_ID)
    assert settle(guide) is GuideState.COMPLETE


def test_several_end_tokens_or_none(tokenizer: HuggingFaceTokenizer) -> None:
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    for eos_token_ids in ((), (EOS_ID, 170)):
        compiler = GrammarCompiler(tokenizer, 192, eos_token_ids)
        guide = compiler.open(regex_grammar("regex", "a?"))
        assert settle(guide) is GuideState.OPEN
        assert allowed(guide) == sorted((a, *eos_token_ids))
        guide.advance(a)
        assert settle(guide) is GuideState.COMPLETE
        compiler.close()


def test_rows_without_a_token_are_never_allowed(compiler: GrammarCompiler) -> None:
    guide = compiler.open(regex_grammar("regex", "(?s:.)+"))
    assert settle(guide) is GuideState.OPEN
    assert guide.mask.shape == (6,) and max(allowed(guide)) < VOCAB_SIZE
    assert not {0, 1, 2} & set(allowed(guide))


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar("regex", "[ab"), "unclosed character class"),
        (Grammar("regex", r"\bx"), "lookarounds"),
        (Grammar("json_schema", '{"type":"objec"}'), "objec"),
        (Grammar("json_schema", '{"allOf":[{"type":"string"},{"type":"null"}]}'), "nsatisfiable"),
        (Grammar("json_schema", '{"$ref":"http://example.com/x"}'), "example.com"),
        (Grammar("json_schema", '{"a":' * 500 + "1" + "}" * 500), "recursion"),
    ],
)
def test_what_cannot_be_followed_is_told(
    compiler: GrammarCompiler, grammar: Grammar, told: str
) -> None:
    with pytest.raises(RequestError, match=told) as raised:
        compiler.check(replace(grammar, field="guided_x")).result(10)
    assert raised.value.field == "guided_x"
    guide = compiler.open(grammar)
    assert settle(guide) is GuideState.FAILED and told in str(guide.error)


def test_a_vocabulary_that_cannot_go_on_fails_the_guide(compiler: GrammarCompiler) -> None:
    guide = compiler.open(regex_grammar("regex", "\x01+"))
    assert settle(guide) is GuideState.FAILED and "no token" in str(guide.error)


def test_too_much_work_is_bounded_and_fails_alone(compiler: GrammarCompiler) -> None:
    heavy = compiler.open(regex_grammar("regex", "(a?){1000}a{1000}"))
    assert settle(heavy) is GuideState.OPEN
    heavy.advance(allowed(heavy)[0])
    assert settle(heavy) is GuideState.FAILED and "too many" in str(heavy.error)
    light = compiler.open(regex_grammar("regex", "a"))
    assert settle(light) is GuideState.OPEN


def test_each_grammar_is_compiled_once_while_it_is_remembered(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    compiler = GrammarCompiler(tokenizer, 192, (EOS_ID,))
    guides: Sequence[Guide] = [
        compiler.open(json_object_grammar("response_format")) for _ in range(8)
    ]
    assert {settle(guide) for guide in guides} == {GuideState.OPEN}
    assert compiler.num_compiled == 1
    for index in range(MAX_REMEMBERED):
        compiler.check(Grammar("regex", f"a{{{index + 1}}}")).result(10)
    compiler.check(json_object_grammar("response_format")).result(10)
    assert compiler.num_compiled == MAX_REMEMBERED + 2
    compiler.close()
