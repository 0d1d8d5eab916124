"""Rows whose pages come while they decode, and rows taken out and resumed: the same tokens."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jpd.engine.decode import DecodeEngine
from jpd.engine.decode_row import DecodeRow
from jpd.engine.prefill import PrefillTask
from jpd.request import SamplingParams
from tests.engine.rig import (
    PAGE,
    SEVERAL_STEPS,
    Rig,
    generate,
    random_prompt,
    rig,
    run_decode,
    run_prefill,
)

SETTINGS = (
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=1.1, top_p=0.9, seed=11, max_tokens=40),
)


def prefilled(on: Rig, name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> DecodeRow:
    """A row with the pages of its prompt alone."""
    pages = on.take(len(prompt))
    task = PrefillTask(name, prompt, pages, 0, sampling)
    token = run_prefill(on.prefill_engine(), task)[name].token_id
    return DecodeRow(name, pages, token, prompt, sampling)


def grow(on: Rig, engine: DecodeEngine, num_steps: int) -> list[int]:
    """Give every row the pages of so many steps."""
    taken = []
    for attempt_id in engine.short_rows(num_steps):
        while engine.is_short(attempt_id, num_steps):
            taken += on.take(1)
            engine.grow(attempt_id, taken[-1])
    return taken


@pytest.mark.parametrize("ahead", [1, 4, 3 * PAGE])
def test_rows_that_grow_equal_rows_that_had_all_pages_from_the_start(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = rig("llama3")
    prompts = {str(n): random_prompt(n, n) for n in (15, 16, 17, 30)}
    samplings = dict(zip(prompts, SETTINGS * 2, strict=True))
    alone = {name: generate(on, prompt, samplings[name]) for name, prompt in prompts.items()}
    rows = [prefilled(on, name, prompt, samplings[name]) for name, prompt in prompts.items()]
    engine, taken = on.decode_engine(), []
    monkeypatch.setattr(engine, "_observe", lambda step: None)
    engine._seconds_per_step = 1e-4
    found = {row.attempt_id: [row.first_token_id] for row in rows}
    for row in rows:
        engine.insert(row)
    while engine.has_work:
        taken += grow(on, engine, ahead)
        for done in engine.step(nobody_waits=True):
            found[done.attempt_id] += done.token_ids
    assert found == alone
    for row in rows:
        on.allocator.free(row.page_ids)
    on.allocator.free(taken)


def test_pages_of_a_row_that_left_are_not_put_into_the_next_one_of_its_slot() -> None:
    on = rig("llama3")
    prompt = random_prompt(16, 16)
    alone = generate(on, prompt, SETTINGS[0])
    old, new = prefilled(on, "old", prompt, SETTINGS[0]), prefilled(on, "new", prompt, SETTINGS[0])
    engine = on.decode_engine()
    engine.insert(old)
    taken = grow(on, engine, 1)
    engine.step()
    for _ in range(3):
        taken += on.take(1)
        engine.grow("old", taken[-1])
    engine.remove("old")
    fresh = on.take(SETTINGS[0].max_tokens or 0)
    engine.insert(replace(new, page_ids=new.page_ids + fresh))
    tokens = [new.first_token_id]
    while engine.has_work:
        tokens += [token for done in engine.step() for token in done.token_ids]
    assert tokens == alone
    for held in (old.page_ids, new.page_ids, fresh, taken):
        on.allocator.free(held)


def test_a_call_of_several_steps_needs_pages_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = rig("llama3", engine=SEVERAL_STEPS)
    row = prefilled(on, "a", random_prompt(PAGE - 3, PAGE - 3), SETTINGS[0])
    engine, shapes, decode = on.decode_engine(), [], on.functions.decode
    monkeypatch.setattr(on.functions, "decode", lambda *a: shapes.append(a[3]) or decode(*a))
    monkeypatch.setattr(engine, "_observe", lambda step: None)
    engine._seconds_per_step = 1e-4
    engine.insert(row)
    engine.step(nobody_waits=True)
    assert engine.short_rows(1) == [] and engine.short_rows(4) == ["a"]
    engine.step(nobody_waits=True)
    assert shapes[-1].num_steps == 1, "two places are left"
    taken = grow(on, engine, 4)
    engine.step(nobody_waits=True)
    assert shapes[-1].num_steps == 4
    engine.remove("a")
    on.allocator.free(row.page_ids)
    on.allocator.free(taken)


def test_new_pages_update_the_state_in_place() -> None:
    on = rig("llama3")
    state = on.functions.new_state()
    grown = on.functions.add_pages(state, [(1, 2, 7), (0, 3, 9)])
    assert all(array.is_deleted() for array in jax.tree.leaves(state))
    table = np.asarray(grown.page_table)
    assert (table[1, 2], table[0, 3]) == (7, 9)
    assert np.count_nonzero(table) == 2


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("cuts", [(1,), (2,), (30,), (3, 20)])
def test_d12_a_row_taken_out_and_prefilled_again_goes_on_as_if_nothing_had_been(
    cuts: tuple[int, ...], sampling: SamplingParams
) -> None:
    """cuts: after how many tokens. Its prompt and its tokens are prefilled, the rest is decoded."""
    on, prompt = rig("gemma3"), random_prompt(21, 21)
    assert sampling.max_tokens is not None
    whole, tokens = generate(on, prompt, sampling), []
    for cut in (*cuts, sampling.max_tokens):
        left = replace(sampling, max_tokens=sampling.max_tokens - len(tokens))
        pages = on.take(len(prompt) + sampling.max_tokens)
        task = PrefillTask("a", (*prompt, *tokens), pages, 0, left)
        first = run_prefill(on.prefill_engine(), task)["a"]
        row = DecodeRow("a", pages, first.token_id, task.token_ids, left)
        found = [first.token_id]
        if first.finish_reason is None:
            found = run_decode(on.decode_engine(), row)["a"]
        tokens += found[: cut - len(tokens)]
        on.allocator.free(pages)
    assert tokens == whole
