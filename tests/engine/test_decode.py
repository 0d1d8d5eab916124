"""The decode engine: the same tokens in any company, exact lengths, stale results dropped."""

import random
from typing import Any

import pytest

from jpd.engine.decode_row import DecodeRow
from jpd.engine.prefill import PrefillTask
from jpd.engine.results import StepResults
from jpd.request import FinishReason, SamplingParams
from tests.engine.rig import (
    GREEDY,
    NUM_SLOTS,
    PAGE,
    Rig,
    expected,
    generate,
    random_prompt,
    rig,
    run_decode,
    run_prefill,
)

MODELS = ("gemma3", "llama3")


def prefilled(
    on: Rig,
    prompt: tuple[int, ...],
    name: str,
    sampling: SamplingParams = GREEDY,
    stop: tuple[int, ...] = (),
) -> DecodeRow:
    assert sampling.max_tokens is not None
    pages = on.take(len(prompt) + sampling.max_tokens)
    task = PrefillTask(name, prompt, pages, 0, sampling, stop)
    token = run_prefill(on.prefill_engine(), task)[name].token_id
    return DecodeRow(name, pages, token, prompt, sampling, stop)


def free(on: Rig, *rows: DecodeRow) -> None:
    for row in rows:
        on.allocator.free(row.page_ids)


def naive_greedy(on: Rig, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """The whole sequence from the start for every token, no KV reused."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(on.functions.logits(on.leaves, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33])
def test_a05_decode_equals_recomputing_everything_around_page_boundaries(
    name: str, num_tokens: int
) -> None:
    prompt = random_prompt(num_tokens, num_tokens)
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    wanted = naive_greedy(rig(name, chunk=256), prompt, 20)
    assert generate(rig(name), prompt, sampling) == wanted


@pytest.mark.field_report("D10", "D13")
@pytest.mark.parametrize("name", MODELS)
def test_rows_come_and_go_without_changing_their_neighbours(name: str) -> None:
    on, rng = rig(name), random.Random(0)
    lengths = [5, 16, 40, 100, 31, 64, 17, 200]
    prompts = {str(i): random_prompt(i, length) for i, length in enumerate(lengths)}
    settings = {
        key: SamplingParams(temperature=0.0, max_tokens=rng.randint(2, 24)) for key in prompts
    }
    alone = {key: generate(on, prompt, settings[key]) for key, prompt in prompts.items()}
    engine = on.decode_engine()
    waiting, rows, found = list(prompts), {}, {}
    removed: dict[str, int] = {}
    while waiting or engine.has_work:
        while waiting and engine.num_free_slots and rng.random() < 0.5:
            key = waiting.pop(0)
            rows[key] = prefilled(on, prompts[key], key, settings[key])
            found[key] = [rows[key].first_token_id]
            engine.insert(rows[key])
        for done in engine.step():
            assert done.attempt_id not in removed, "a removed row spoke"
            found[done.attempt_id] += done.token_ids
        if rng.random() < 0.1 and engine._by_attempt:
            gone = rng.choice(list(engine._by_attempt))
            engine.remove(gone)
            removed[gone] = len(found[gone])
            on.allocator.free(rows.pop(gone).page_ids)
    assert removed and len(removed) < len(prompts)
    for key, tokens in found.items():
        assert tokens == alone[key][: removed.get(key, len(alone[key]))]
    free(on, *rows.values())
    assert engine.num_free_slots == NUM_SLOTS
    assert on.allocator.num_held == 0


def test_e04_max_tokens_counts_the_first_token_and_a_stop_id_ends_at_once() -> None:
    on = rig("llama3")
    prompt = tuple(expected("llama3")["prompts"][0].tolist())
    golden = expected("llama3")["greedy"][0].tolist()

    def finish(max_tokens: int, **fields: Any) -> tuple[list[int], FinishReason | None]:
        stop = fields.pop("stop", ())
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)
        row = prefilled(on, prompt, "a", sampling, stop)
        engine = on.decode_engine()
        engine.insert(row)
        tokens, reasons = [row.first_token_id], []
        while engine.has_work:
            for done in engine.step():
                tokens += done.token_ids
                reasons.append(done.finish_reason)
        free(on, row)
        assert set(reasons[:-1]) <= {None}
        return tokens, reasons[-1]

    for max_tokens in (2, 3, 10):
        assert finish(max_tokens) == (golden[:max_tokens], "length")
    where = next(i for i in range(3, 30) if golden[i] not in golden[:i])
    stop = (golden[where],)
    assert finish(32, stop=stop) == (golden[: where + 1], "stop")
    assert finish(where + 1, stop=stop) == (golden[: where + 1], "stop"), "stop wins over length"
    tokens, reason = finish(where + 4, stop=stop, min_tokens=where + 2)
    assert tokens[:where] == golden[:where] and golden[where] not in tokens[: where + 2]
    assert reason in ("stop", "length")


def test_only_tokens_it_needs_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    on = rig("llama3")
    row = prefilled(on, random_prompt(1, 20), "a", SamplingParams(temperature=0.0, max_tokens=5))
    engine = on.decode_engine()
    num_steps = []
    decode = on.functions.decode
    monkeypatch.setattr(on.functions, "decode", lambda *a: num_steps.append(1) or decode(*a))
    run_decode(engine, row)
    assert len(num_steps) == 4, "the host knows when the last allowed token is on its way"
    free(on, row)


def test_a_result_of_a_slot_s_former_row_is_dropped() -> None:
    on = rig("llama3")
    old = prefilled(on, random_prompt(1, 20), "old")
    new = prefilled(on, random_prompt(2, 20), "new")
    alone = run_decode(on.decode_engine(), new)["new"]
    engine = on.decode_engine()
    engine.insert(old)
    engine.step()
    engine.step()
    engine.remove("old")  # its step is on the device
    engine.insert(new)
    assert engine._by_attempt["new"].slot == 0, "the same slot"
    tokens = [new.first_token_id]
    while engine.has_work:
        for done in engine.step():
            assert done.attempt_id == "new"
            tokens += done.token_ids
    assert tokens == alone
    free(on, old, new)


def test_pages_of_a_removed_row_can_be_given_to_another_at_once() -> None:
    on = rig("llama3")
    prompt = random_prompt(3, 40)
    alone = generate(on, prompt)
    engine = on.decode_engine()
    old = prefilled(on, random_prompt(1, 20), "old")
    engine.insert(old)
    for _ in range(3):
        engine.step()
    engine.remove("old")
    free(on, old)
    new = prefilled(on, prompt, "new")
    assert set(new.page_ids) & set(old.page_ids)
    assert run_decode(engine, new)["new"] == alone
    free(on, new)


def test_a_row_removed_before_its_first_step_leaves_nothing() -> None:
    on = rig("llama3")
    row = prefilled(on, random_prompt(1, 20), "a")
    engine = on.decode_engine()
    engine.insert(row)
    engine.remove("a")
    engine.remove("a")
    assert engine.step() == [] and not engine.has_work
    assert engine.num_free_slots == NUM_SLOTS
    free(on, row)


@pytest.mark.parametrize("name", MODELS)
def test_seeded_sampling_does_not_depend_on_the_batch(name: str) -> None:
    on = rig(name)
    prompt = random_prompt(1, 20)
    mine = SamplingParams(temperature=1.2, top_p=0.9, seed=77, max_tokens=20)
    alone = generate(on, prompt, mine)
    assert alone == generate(on, prompt, mine)
    other_seed = SamplingParams(temperature=1.2, top_p=0.9, seed=78, max_tokens=20)
    assert alone != generate(on, prompt, other_seed)
    others = [
        prefilled(on, random_prompt(8, 9), "b", SamplingParams(temperature=2.0, max_tokens=9)),
        prefilled(on, random_prompt(9, 90), "c", GREEDY),
    ]
    row = prefilled(on, prompt, "a", mine)
    assert run_decode(on.decode_engine(), *others, row)["a"] == alone
    free(on, row, *others)


class ReadSpy:
    """Stands for a step's results and notes when the host reads them."""

    def __init__(self, results: StepResults) -> None:
        self.results = results
        self.was_copied = self.was_read = False

    def without_logprobs(self) -> "ReadSpy":
        self.results = self.results.without_logprobs()
        return self

    def copy_to_host_async(self) -> None:
        self.was_copied = True
        self.results.copy_to_host_async()

    def to_host(self) -> StepResults:
        self.was_read = True
        return self.results.to_host()


def test_the_host_reads_nothing_but_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    on = rig("llama3")
    rows = [prefilled(on, random_prompt(i, 20 + i), str(i)) for i in range(3)]
    engine, decode = on.decode_engine(), on.functions.decode
    spies: list[ReadSpy] = []

    def spied(*inputs: Any) -> Any:
        layers, state, results = decode(*inputs)
        spies.append(ReadSpy(results))
        return layers, state, spies[-1]

    monkeypatch.setattr(on.functions, "decode", spied)
    for row in rows:
        engine.insert(row)
    assert engine.step() == []
    for num_steps in range(2, 12):
        assert len(engine.step()) == 3
        assert [spy.was_read for spy in spies] == [True] * (num_steps - 1) + [False]
        assert all(spy.was_copied for spy in spies)
    for row in rows:
        engine.remove(row.attempt_id)
    engine.step()
    free(on, *rows)


def test_shape_follows_the_last_slot_and_the_longest_row_that_run() -> None:
    on = rig("llama3")
    widths = on.functions.buckets.context_widths
    narrow = next(width for width in widths if width * PAGE > 20)
    short = prefilled(on, random_prompt(1, 20), "short")
    long = prefilled(on, random_prompt(1, 100), "long")
    engine = on.decode_engine()
    engine.insert(short)
    engine.insert(long)
    assert engine._build(engine._schedule(), 1) == (NUM_SLOTS, widths[-1], 1, 0)
    engine.remove("long")
    assert engine._build(engine._schedule(), 1) == (1, narrow, 1, 0)
    engine.insert(long)
    engine.remove("short")
    assert engine._build(engine._schedule(), 1) == (NUM_SLOTS, widths[-1], 1, 0)
    engine.insert(short)
    assert engine._by_attempt["short"].slot == 0, "the lowest free slot"
    engine.remove("long")
    engine.remove("short")
    free(on, long, short)


def test_rows_that_cannot_be_are_refused() -> None:
    on = rig("llama3")
    engine = on.decode_engine()
    row = DecodeRow("a", (1, 2, 3, 4), 5, (7,) * 20, SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="has had its only token"):
        engine.insert(row)
    for index in range(NUM_SLOTS):
        engine.insert(DecodeRow(str(index), (1, 2, 3, 4), 5, (7,) * 20, GREEDY))
    with pytest.raises(RuntimeError, match="no free slot"):
        engine.insert(DecodeRow("b", (1, 2, 3, 4), 5, (7,) * 20, GREEDY))
    for index in range(NUM_SLOTS):
        engine.remove(str(index))
    assert engine.num_free_slots == NUM_SLOTS
