"""Guided rows in the engines: random weights give valid answers, and nobody else is disturbed."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from jpd.engine.decode_row import DecodeRow
from jpd.engine.prefill import PrefillTask
from jpd.grammar import Grammar, choice_grammar, json_schema_grammar, regex_grammar
from jpd.guidance.compiler import GrammarCompiler
from jpd.guidance.guide import Guide, GuideState, wait_for_any
from jpd.request import SamplingParams
from jpd.tokenizer import HuggingFaceTokenizer, load_huggingface_tokenizer
from tests.engine.rig import Rig, generate, random_prompt, rig, run_prefill
from tests.support.tiny_tokenizer import EOS_ID, write_tiny_tokenizer

SCHEMA = json_schema_grammar(
    "schema",
    {
        "type": "object",
        "properties": {
            "the": {"enum": ["on", "off"]},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["the", "n"],
        "additionalProperties": False,
    },
)
REGEX = regex_grammar("regex", "(the|in)( [ab]{2,4}){1,3}")
CHOICE = choice_grammar("choice", ["the cat", "a dog", "on"])
FREE = SamplingParams(temperature=0.9, seed=5, max_tokens=24)


def check_schema(text: str) -> None:
    answer = json.loads(text)
    assert answer["the"] in ("on", "off") and 0 <= answer["n"] <= 99, answer


def check_regex(text: str) -> None:
    assert re.fullmatch(REGEX.text, text), text


def check_choice(text: str) -> None:
    assert text in json.loads(CHOICE.text), text


CHECKS: dict[Grammar, Callable[[str], None]] = {
    SCHEMA: check_schema,
    REGEX: check_regex,
    CHOICE: check_choice,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return load_huggingface_tokenizer(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: HuggingFaceTokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, 160, (EOS_ID,))
    yield compiler
    compiler.close()


def settled(guide: Guide) -> Guide:
    while guide.state is GuideState.PENDING:
        wait_for_any([guide], 1.0)
    assert guide.state is not GuideState.FAILED, guide.error
    return guide


def prefilled(
    on: Rig, compiler: GrammarCompiler, name: str, seed: int, sampling: SamplingParams
) -> DecodeRow:
    """The row of a prompt with its first token, chosen from its grammar's start."""
    prompt = random_prompt(seed, 20)
    assert sampling.max_tokens is not None
    pages = on.take(len(prompt) + sampling.max_tokens)
    grammar = sampling.grammar
    mask = None if grammar is None else settled(compiler.open(grammar)).mask
    task = PrefillTask(name, prompt, pages, 0, sampling, (EOS_ID,), mask=mask)
    token_id = run_prefill(on.prefill_engine(), task)[name].token_id
    guide = None if grammar is None else compiler.open(grammar, [token_id])
    return DecodeRow(name, pages, token_id, tuple(prompt), sampling, (EOS_ID,), guide=guide)


def decode(on: Rig, *rows: DecodeRow) -> tuple[dict[str, list[int]], dict[str, str], int]:
    """Tokens and ends of all rows, and how many steps were dispatched."""
    engine = on.decode_engine()
    tokens = {row.attempt_id: [row.first_token_id] for row in rows}
    ends: dict[str, str] = {}
    for row in rows:
        engine.insert(row)
    with mock.patch.object(on.functions, "decode", wraps=on.functions.decode) as dispatch:
        while engine.has_work:
            for done in engine.step():
                assert done.error is None
                tokens[done.attempt_id] += done.token_ids
                if done.finish_reason is not None:
                    ends[done.attempt_id] = done.finish_reason
    for row in rows:
        on.allocator.free(row.page_ids)
    return tokens, ends, dispatch.call_count


@pytest.mark.parametrize("seed", range(3))
def test_answers_of_random_weights_are_valid_and_neighbours_untouched(
    compiler: GrammarCompiler, tokenizer: HuggingFaceTokenizer, seed: int
) -> None:
    on = rig("llama3")
    sampling = SamplingParams(temperature=1.5, seed=seed, max_tokens=64)
    rows = [
        prefilled(on, compiler, grammar.kind, seed, replace(sampling, grammar=grammar))
        for grammar in CHECKS
    ]
    free = prefilled(on, compiler, "free", seed, FREE)
    tokens, ends, num_steps = decode(on, *rows, free)
    for grammar, check in CHECKS.items():
        assert ends[grammar.kind] == "stop"
        check(tokenizer.decode(tokens[grammar.kind]))
    assert tokens["free"] == generate(on, random_prompt(seed, 20), FREE, (EOS_ID,))


def test_only_guided_rows_pause(compiler: GrammarCompiler) -> None:
    """A free row has a token in every step, whatever the guide's thread takes its time for."""
    on = rig("llama3")
    sampling = SamplingParams(temperature=0.0, max_tokens=12, grammar=regex_grammar("r", "[ab]+"))
    free = prefilled(on, compiler, "free", 1, replace(FREE, max_tokens=48, ignore_eos=True))
    free = replace(free, stop_token_ids=())
    tokens, _, num_steps = decode(on, free, prefilled(on, compiler, "guided", 2, sampling))
    assert len(tokens["free"]) == 48 and 1 < len(tokens["guided"]) <= 12
    assert num_steps <= len(tokens["free"]) + len(tokens["guided"])
    tokens, _, num_steps = decode(on, prefilled(on, compiler, "guided", 2, sampling))
    assert num_steps <= len(tokens["guided"])  # alone it pauses never
    rows = [prefilled(on, compiler, f"guided {seed}", seed, sampling) for seed in range(3)]
    tokens, _, num_steps = decode(on, *rows)
    assert num_steps <= sum(map(len, tokens.values()))


def test_max_tokens_ends_an_answer_in_the_middle(compiler: GrammarCompiler) -> None:
    on = rig("llama3")
    sampling = SamplingParams(temperature=0.0, max_tokens=3, grammar=SCHEMA)
    tokens, ends, _ = decode(on, prefilled(on, compiler, "cut", 4, sampling))
    assert ends == {"cut": "length"} and len(tokens["cut"]) == 3


def test_min_tokens_cannot_break_a_grammar(
    compiler: GrammarCompiler, tokenizer: HuggingFaceTokenizer
) -> None:
    """Where only a stop token is allowed, it is taken before min_tokens too, and ends nothing."""
    on = rig("llama3")
    (x,) = tokenizer.encode("x", add_special_tokens=False)
    sampling = SamplingParams(max_tokens=9, min_tokens=6, temperature=0.0)
    grammar = regex_grammar("regex", "x{8}")
    row = prefilled(on, compiler, "x", 3, replace(sampling, grammar=grammar))
    tokens, ends, _ = decode(on, replace(row, stop_token_ids=(EOS_ID, x)))
    assert tokens["x"] == [x] * 7 and ends == {"x": "stop"}


def test_a_grammar_that_takes_too_much_fails_its_own_row(compiler: GrammarCompiler) -> None:
    on = rig("llama3")
    grammar = regex_grammar("regex", "(a?){1000}a{1000}")
    sampling = SamplingParams(temperature=0.0, max_tokens=8, grammar=grammar)
    heavy = prefilled(on, compiler, "heavy", 1, sampling)
    free = prefilled(on, compiler, "free", 1, FREE)
    engine = on.decode_engine()
    engine.insert(heavy)
    engine.insert(free)
    tokens, errors = [free.first_token_id], {}
    while engine.has_work:
        for done in engine.step():
            if done.error is not None:
                errors[done.attempt_id] = str(done.error)
            elif done.attempt_id == "free":
                tokens += done.token_ids
    assert list(errors) == ["heavy"] and "too many" in errors["heavy"]
    assert tokens == generate(on, random_prompt(1, 20), FREE, (EOS_ID,))
    assert engine.num_free_slots == 4
    for row in (heavy, free):
        on.allocator.free(row.page_ids)
