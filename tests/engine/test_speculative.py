"""Speculation changes no token: against plain steps of the same executables' twins."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jpd.config import EngineConfig
from jpd.engine.decode_row import DecodeRow
from jpd.engine.prefill import PrefillTask
from jpd.request import SamplingParams
from tests.engine.rig import CHUNK, PAGE, Rig, generate, random_prompt, rig, run_prefill

pytestmark = pytest.mark.slow  # executables of their own are compiled

DRAFTS = 3
ENGINE = EngineConfig(
    max_model_len=128,
    prefill_chunk=CHUNK,
    prefill_buckets=(CHUNK,),
    context_buckets=(128,),
    max_steps_per_call=1,
    max_speculative_tokens=DRAFTS,
)
"""Few shapes to compile."""
KINDS = ("deepseek_v3", "gemma2", "gemma3", "gpt_oss", "llama3", "mixtral")
"""Of attention and of layers: latent, with soft caps, in windows, with sinks, plain; experts."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_tokens=40)


def repetitive(seed: int, num_tokens: int) -> tuple[int, ...]:
    part = random_prompt(seed, 7)
    return tuple((part * num_tokens)[:num_tokens])


def speculative(sampling: SamplingParams, num_drafts: int = DRAFTS) -> SamplingParams:
    return replace(sampling, num_speculative_tokens=num_drafts)


def prefilled(
    on: Rig,
    name: str,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    stop_token_ids: tuple[int, ...] = (),
) -> DecodeRow:
    assert sampling.max_tokens is not None
    pages = on.take(len(prompt) + sampling.max_tokens)
    task = PrefillTask(name, prompt, pages, 0, sampling, stop_token_ids)
    first = run_prefill(on.prefill_engine(), task)[name]
    return DecodeRow(name, pages, first.token_id, prompt, sampling, stop_token_ids)


def decode(
    on: Rig, *rows: DecodeRow
) -> tuple[dict[str, list[int]], dict[str, str], tuple[int, int]]:
    """Tokens, ends, and how many drafts were verified and right."""
    engine = on.decode_engine()
    tokens = {row.attempt_id: [row.first_token_id] for row in rows}
    ends: dict[str, str] = {}
    num_verified = num_right = 0
    for row in rows:
        engine.insert(row)
    while engine.has_work:
        for done in engine.step(nobody_waits=True):
            tokens[done.attempt_id] += done.token_ids
            num_verified += done.num_drafts
            num_right += len(done.token_ids) - 1 if done.num_drafts else 0
            if done.finish_reason is not None:
                ends[done.attempt_id] = done.finish_reason
    for row in rows:
        on.allocator.free(row.page_ids)
    return tokens, ends, (num_verified, num_right)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_family_gives_the_same_tokens(name: str) -> None:
    on = rig(name, engine=ENGINE)
    for sampling in (GREEDY, SEEDED):
        prompt = repetitive(3, PAGE + 9)
        row = prefilled(on, "a", prompt, speculative(sampling))
        tokens, ends, _ = decode(on, row)
        assert tokens["a"] == generate(on, prompt, sampling) and ends == {"a": "length"}


def test_drafts_are_accepted_and_save_steps() -> None:
    on = rig("llama3", engine=ENGINE)
    num_verified = num_right = 0
    for seed in range(4):
        prompt = repetitive(seed, 30)
        tokens, _, counts = decode(on, prefilled(on, "a", prompt, speculative(GREEDY)))
        assert tokens["a"] == generate(on, prompt, GREEDY)
        num_verified, num_right = num_verified + counts[0], num_right + counts[1]
    assert 0 < num_right <= num_verified


def test_mixed_batches_and_page_boundaries() -> None:
    """Plain, speculating, penalised and seeded rows together, each as it is alone."""
    on = rig("llama3", engine=ENGINE)
    cases: dict[str, tuple[tuple[int, ...], SamplingParams]] = {
        "plain": (random_prompt(1, PAGE - 1), GREEDY),
        "greedy": (repetitive(2, 2 * PAGE - 2), speculative(GREEDY)),
        "seeded": (repetitive(3, PAGE + 1), speculative(SEEDED, 2)),
        "penalised": (repetitive(4, PAGE), speculative(replace(GREEDY, frequency_penalty=0.7))),
    }
    rows = [prefilled(on, name, *case) for name, case in cases.items()]
    tokens, _, (num_verified, _) = decode(on, *rows)
    for name, (prompt, sampling) in cases.items():
        alone = replace(sampling, num_speculative_tokens=0)
        assert tokens[name] == generate(on, prompt, alone), name
    assert num_verified > 0


def stop_inside(tokens: Sequence[int], first: int) -> tuple[int, int]:
    """A token that stands in the answer from `first` on and not before, and where."""
    place = next(i for i in range(first, len(tokens)) if tokens[i] not in tokens[:i])
    return tokens[place], place


@pytest.mark.parametrize("seed", range(3))
def test_ends_come_at_the_right_token(seed: int) -> None:
    on = rig("llama3", engine=ENGINE)
    prompt = repetitive(seed, 25)
    plain = generate(on, prompt, SEEDED)
    stop, place = stop_inside(plain, 2)
    row = prefilled(on, "stop", prompt, speculative(SEEDED), (stop,))
    tokens, ends, _ = decode(on, row)
    assert tokens["stop"] == plain[: place + 1] and ends == {"stop": "stop"}
    late = replace(SEEDED, min_tokens=place + 3)
    tokens, ends, _ = decode(on, prefilled(on, "late", prompt, speculative(late), (stop,)))
    assert tokens["late"] == generate(on, prompt, late, (stop,))
    for max_tokens in range(2, 8):
        short = replace(SEEDED, max_tokens=max_tokens)
        tokens, ends, _ = decode(on, prefilled(on, "short", prompt, speculative(short)))
        assert tokens["short"] == plain[:max_tokens] and ends == {"short": "length"}


def test_kept_pages_hold_only_what_was_accepted() -> None:
    """Going on from the pages of a speculating row gives what a fresh prefill gives."""
    on = rig("llama3", engine=ENGINE)
    prompt = repetitive(5, 2 * PAGE - 3)
    row = prefilled(on, "a", prompt, speculative(replace(GREEDY, max_tokens=24)))
    engine = on.decode_engine()
    engine.insert(row)
    tokens = [row.first_token_id]
    while engine.has_work:
        for done in engine.step():
            tokens += done.token_ids
    whole = (*prompt, *tokens)
    num_kept = (len(whole) - 1) // PAGE * PAGE
    fresh = on.take(len(whole))
    run_prefill(on.prefill_engine(), PrefillTask("b", whole, fresh, 0, GREEDY))
    for layer in on.cache.layers:
        pool = np.asarray(layer)
        kept, again = (pool[list(pages[: num_kept // PAGE])] for pages in (row.page_ids, fresh))
        assert np.abs(kept - again).max() < 1e-4
    on.allocator.free((*row.page_ids, *fresh))
