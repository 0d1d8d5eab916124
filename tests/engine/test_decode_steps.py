"""Several decode steps in one call: the same tokens and ends, and only when nobody waits."""

import random
from typing import Any

import pytest

from jpd.engine.buckets import DecodeShape
from jpd.engine.decode import MAX_CALL_SECONDS, DecodeEngine
from jpd.engine.decode_row import DecodeRow
from jpd.engine.prefill import PrefillTask
from jpd.request import FinishReason, SamplingParams
from tests.engine.rig import SEVERAL_STEPS, Rig, generate, random_prompt, rig, run_prefill

STEPS = 4


@pytest.fixture
def on() -> Rig:
    return rig("llama3", engine=SEVERAL_STEPS)


def engine_of(on: Rig, monkeypatch: pytest.MonkeyPatch) -> tuple[DecodeEngine, list[DecodeShape]]:
    """An engine that believes in fast steps, and the shapes of its calls."""
    engine, shapes, decode = on.decode_engine(), [], on.functions.decode
    monkeypatch.setattr(engine, "_observe", lambda step: None)
    engine._seconds_per_step = 1e-4

    def spied(*inputs: Any) -> Any:
        shapes.append(inputs[3])
        return decode(*inputs)

    monkeypatch.setattr(on.functions, "decode", spied)
    return engine, shapes


def prefilled(
    on: Rig, name: str, length: int, sampling: SamplingParams, stop: tuple[int, ...] = ()
) -> DecodeRow:
    assert sampling.max_tokens is not None
    prompt = random_prompt(length, length)
    pages = on.take(length + sampling.max_tokens)
    task = PrefillTask(name, prompt, pages, 0, sampling, stop)
    token = run_prefill(on.prefill_engine(), task)[name].token_id
    return DecodeRow(name, pages, token, prompt, sampling, stop)


def run(engine: DecodeEngine, *rows: DecodeRow) -> dict[str, tuple[list[int], FinishReason | None]]:
    found: dict[str, tuple[list[int], FinishReason | None]] = {
        row.attempt_id: ([row.first_token_id], None) for row in rows
    }
    for row in rows:
        engine.insert(row)
    while engine.has_work:
        for done in engine.step(nobody_waits=True):
            tokens, reason = found[done.attempt_id]
            assert reason is None, "nothing comes after the end"
            found[done.attempt_id] = ([*tokens, *done.token_ids], done.finish_reason)
    return found


@pytest.mark.parametrize("max_tokens", [2, 3, 5, 6, 7, 8, 9, 13])
def test_every_length_ends_where_single_steps_end_it(
    on: Rig, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    alone = generate(on, random_prompt(20, 20), sampling)
    row = prefilled(on, "a", 20, sampling)
    engine, shapes = engine_of(on, monkeypatch)
    assert run(engine, row)["a"] == (alone, "length")
    expected_calls = 1 + sum(divmod(max_tokens - 2, STEPS))  # the first call is with an arrival
    assert len(shapes) == expected_calls
    on.allocator.free(row.page_ids)


def test_a_stop_id_in_the_middle_of_a_call_ends_the_row_there(
    on: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    tokens = generate(on, random_prompt(20, 20), greedy)
    places = [i for i in range(2, 20) if tokens[i] not in tokens[:i]][:6]
    assert len({place % STEPS for place in places}) > 1
    for place in places:
        stop = (tokens[place],)
        row = prefilled(on, "a", 20, greedy, stop)
        engine, shapes = engine_of(on, monkeypatch)
        assert run(engine, row)["a"] == (tokens[: place + 1], "stop")
        assert any(shape.num_steps == STEPS for shape in shapes)
        on.allocator.free(row.page_ids)
    early = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=places[0] + 3)
    alone = generate(on, random_prompt(20, 20), early, (tokens[places[0]],))
    row = prefilled(on, "a", 20, early, (tokens[places[0]],))
    engine, _ = engine_of(on, monkeypatch)
    assert run(engine, row)["a"][0] == alone
    on.allocator.free(row.page_ids)


def test_rows_of_all_kinds_together_equal_each_alone(
    on: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    settings = {
        length: SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=length, max_tokens=rng.randint(2, 30)
        )
        for length in (3, 17, 40, 90)
    }
    alone = {
        str(length): generate(on, random_prompt(length, length), sampling)
        for length, sampling in settings.items()
    }
    rows = [prefilled(on, str(length), length, sampling) for length, sampling in settings.items()]
    engine, shapes = engine_of(on, monkeypatch)
    found = run(engine, *rows)
    assert {name: tokens for name, (tokens, _) in found.items()} == alone
    assert {shape.num_steps for shape in shapes} == {1, STEPS}
    for row in rows:
        on.allocator.free(row.page_ids)


def test_single_steps_while_somebody_waits_or_steps_are_slow(
    on: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = prefilled(on, "a", 20, SamplingParams(temperature=0.0, max_tokens=30))
    other = prefilled(on, "b", 30, SamplingParams(temperature=0.0, max_tokens=30))
    engine, shapes = engine_of(on, monkeypatch)
    engine.insert(row)
    engine.step(nobody_waits=True)
    assert shapes[-1].num_steps == 1, "a row has just come"
    engine.step(nobody_waits=True)
    assert shapes[-1].num_steps == STEPS
    engine.step(nobody_waits=False)
    assert shapes[-1].num_steps == 1
    engine.insert(other)
    engine.step(nobody_waits=True)
    assert shapes[-1].num_steps == 1
    engine._seconds_per_step = 1.01 * MAX_CALL_SECONDS / STEPS
    engine.step(nobody_waits=True)
    assert shapes[-1].num_steps == 1
    engine._seconds_per_step = 0.99 * MAX_CALL_SECONDS / STEPS
    engine.step(nobody_waits=True)
    assert shapes[-1].num_steps == STEPS
    engine.remove("a")
    engine.step(nobody_waits=True)
    assert shapes[-1].num_steps == 1, "a row has just gone"
    engine.remove("b")
    for held in (row, other):
        on.allocator.free(held.page_ids)


def test_a_call_of_a_row_removed_meanwhile_is_dropped_whole(
    on: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    old, new = prefilled(on, "old", 20, sampling), prefilled(on, "new", 33, sampling)
    alone = generate(on, random_prompt(33, 33), sampling)
    engine, shapes = engine_of(on, monkeypatch)
    engine.insert(old)
    engine.step(nobody_waits=True)
    engine.step(nobody_waits=True)
    assert shapes[-1].num_steps == STEPS
    engine.remove("old")
    assert run(engine, new)["new"] == (alone, "length")
    for held in (old, new):
        on.allocator.free(held.page_ids)


def test_the_measured_time_of_a_step_is_followed(on: Rig) -> None:
    row = prefilled(on, "a", 20, SamplingParams(temperature=0.0, max_tokens=30))
    engine = on.decode_engine()
    engine.insert(row)
    assert engine._seconds_per_step == float("inf")
    while engine.has_work:
        engine.step()
    assert 0 < engine._seconds_per_step < 10
    on.allocator.free(row.page_ids)
