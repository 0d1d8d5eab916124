"""Penalties and log-probabilities through both engines, against goldens and definitions."""

from collections import Counter

import numpy as np
import pytest

from jpd.engine.decode_row import DecodeRow
from jpd.engine.prefill import PrefillDone, PrefillTask
from jpd.request import SamplingParams, TokenLogprobs
from tests.engine.rig import GREEDY, Rig, expected, generate, random_prompt, rig, run_prefill

PENALISED = SamplingParams(
    temperature=0.0,
    max_tokens=16,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((7, 1.5), (9, -100.0)),
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check(entry: TokenLogprobs | None, logprobs: np.ndarray, token_id: int, num_top: int) -> None:
    assert entry is not None
    assert abs(entry.logprob - logprobs[token_id]) < 2e-4
    assert len(entry.top_token_ids) == num_top
    best = -np.sort(-logprobs)[:num_top]
    np.testing.assert_allclose(entry.top_logprobs, best, atol=2e-4)
    np.testing.assert_allclose(logprobs[list(entry.top_token_ids)], best, atol=2e-4)
    assert (entry.rank == 1) == (logprobs[token_id] == logprobs.max())


def decoded(on: Rig, *rows: DecodeRow, nobody_waits: bool) -> dict[str, list[TokenLogprobs]]:
    engine = on.decode_engine()
    found: dict[str, list[TokenLogprobs]] = {row.attempt_id: [] for row in rows}
    for row in rows:
        engine.insert(row)
    while engine.has_work:
        for done in engine.step(nobody_waits=nobody_waits):
            if done.logprobs:
                assert len(done.logprobs) == len(done.token_ids)
            found[done.attempt_id] += done.logprobs
    return found


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_e06_e07_logprobs_equal_those_of_the_golden_logits(name: str) -> None:
    """Several prompts packed in chunks, and prompts longer than a chunk."""
    on, golden = rig(name), expected(name)
    settings = {"temperature": 0.0, "max_tokens": 32, "logprobs": 3}
    prompts = {str(i): tuple(prompt.tolist()) for i, prompt in enumerate(golden["prompts"])}
    tasks = [
        PrefillTask(
            key,
            prompt,
            on.take(len(prompt) + 32),
            0,
            # Only one asks for its prompt's; the others must not get any.
            SamplingParams(**settings, prompt_logprobs=5 if key == "1" else None),
        )
        for key, prompt in prompts.items()
    ]
    done = run_prefill(on.prefill_engine(), *tasks)
    for key, prompt in prompts.items():
        logprobs = log_softmax(golden["logits"][int(key)])
        check(done[key].logprobs[0], logprobs[-1], done[key].token_id, 3)
        of_prompt = done[key].prompt_logprobs
        if key != "1":
            assert of_prompt == ()
            continue
        assert len(of_prompt) == len(prompt) and of_prompt[0] is None
        for position in range(1, len(prompt)):
            check(of_prompt[position], logprobs[position - 1], prompt[position], 5)
    check_decoded(on, tasks, done, golden["greedy"])
    for task in tasks:
        on.allocator.free(task.page_ids)


def check_decoded(
    on: Rig, tasks: list[PrefillTask], done: dict[str, PrefillDone], greedy: np.ndarray
) -> None:
    """The logprobs of the tokens after the first one, of one step a call and of several."""
    rows = [
        DecodeRow(t.attempt_id, t.page_ids, done[t.attempt_id].token_id, t.token_ids, t.sampling)
        for t in tasks
    ]
    for nobody_waits in (False, True):
        found = decoded(on, *rows, nobody_waits=nobody_waits)
        for task in tasks:
            tokens = greedy[int(task.attempt_id)].tolist()
            sequence = [*task.token_ids, *tokens]
            logprobs = log_softmax(on.functions.logits(on.leaves, sequence))
            entries = found[task.attempt_id]
            assert len(entries) == len(tokens) - 1
            for offset, entry in enumerate(entries, start=1):
                check(entry, logprobs[len(task.token_ids) + offset - 1], tokens[offset], 3)


def by_definition(on: Rig, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """Token by token from whole logits, in numpy."""
    tokens: list[int] = []
    assert sampling.max_tokens is not None
    for _ in range(sampling.max_tokens):
        logits = on.functions.logits(on.leaves, (*prompt, *tokens))[-1].astype(np.float64)
        for token_id, bias in sampling.logit_bias:
            logits[token_id] += bias
        for token_id in {*prompt, *tokens}:
            factor = sampling.repetition_penalty
            logits[token_id] *= 1 / factor if logits[token_id] > 0 else factor
        for token_id, count in Counter(tokens).items():
            logits[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * count
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize("length", [5, 16, 40])
def test_penalties_through_both_engines_are_those_of_the_definition(length: int) -> None:
    on, prompt = rig("llama3"), random_prompt(length, length)
    tokens = generate(on, prompt, PENALISED)
    assert tokens == by_definition(on, prompt, PENALISED)
    assert tokens != generate(on, prompt, GREEDY)[:16], "the penalties change nothing"


@pytest.mark.parametrize("num_sent", [1, 7])
def test_a_replayed_sequence_goes_on_with_the_same_penalties(num_sent: int) -> None:
    on, prompt = rig("llama3"), random_prompt(3, 21)
    whole = generate(on, prompt, PENALISED)
    replayed = (*prompt, *whole[:num_sent])
    pages = on.take(len(replayed) + 16)
    rest = {
        "max_tokens": 16 - num_sent,
        "temperature": 0.0,
        "repetition_penalty": PENALISED.repetition_penalty,
        "presence_penalty": PENALISED.presence_penalty,
        "frequency_penalty": PENALISED.frequency_penalty,
        "logit_bias": PENALISED.logit_bias,
    }
    sampling = SamplingParams(**rest)
    task = PrefillTask("again", replayed, pages, 0, sampling, num_output_tokens=num_sent)
    first = run_prefill(on.prefill_engine(), task)["again"].token_id
    row = DecodeRow("again", pages, first, replayed, sampling, num_output_tokens=num_sent)
    engine, tokens = on.decode_engine(), [*whole[:num_sent], first]
    engine.insert(row)
    while engine.has_work:
        for done in engine.step():
            tokens += done.token_ids
    on.allocator.free(pages)
    assert tokens == whole


def test_the_history_holds_prompt_and_output() -> None:
    on, prompt = rig("llama3"), random_prompt(5, 20)
    pages = on.take(52)
    engine, tokens = on.decode_engine(), [5]
    engine.insert(DecodeRow("a", pages, tokens[0], prompt, GREEDY))
    while engine.has_work:
        for done in engine.step(nobody_waits=True):
            tokens += done.token_ids
    history = np.asarray(engine._state.history)[0]
    assert history[:52].tolist() == [*prompt, *tokens]
    assert not history[52:].any()
    on.allocator.free(pages)


def test_a_prompt_whose_logprobs_are_asked_for_cannot_be_cached() -> None:
    engine = rig("llama3").prefill_engine()
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0)
    with pytest.raises(ValueError, match="cached"):
        engine.add(PrefillTask("a", (5,) * 20, (1, 2), 16, sampling))
