"""The prefill engine: chunked equals whole, pieces are complete, late results are dropped."""

import numpy as np
import pytest

from jpd.engine import prefill as prefill_module
from jpd.engine.prefill import PrefillEngine, PrefillTask
from jpd.request import SamplingParams
from tests.engine.rig import CHUNK, GREEDY, PAGE, Rig, random_prompt, rig, run_prefill

MODELS = ("gemma3", "llama3")
DESTINATION = "decode-0"


def task(on: Rig, prompt: tuple[int, ...], name: str = "a", **fields: object) -> PrefillTask:
    pages = fields.pop("page_ids", None) or on.take(len(prompt))
    settings = {"num_cached_tokens": 0, "sampling": GREEDY} | fields
    return PrefillTask(name, prompt, pages, **settings)  # type: ignore[arg-type]


def kv_of(on: Rig, pages: tuple[int, ...], num_tokens: int) -> list[np.ndarray]:
    """[tokens, K, W] of each layer."""
    found = []
    for layer in on.cache.layers:
        rows = np.asarray(layer)[list(pages)]
        found.append(rows.reshape(-1, *rows.shape[2:])[:num_tokens])
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_tokens", [31, 32, 33, 64, 65, 200])
def test_a14_chunked_equals_whole_and_every_position_is_computed_once(
    name: str, num_tokens: int
) -> None:
    prompt = random_prompt(num_tokens, num_tokens)
    results = []
    for on in (rig(name), rig(name, chunk=256)):
        mine = task(on, prompt)
        done = run_prefill(on.prefill_engine(), mine)["a"]
        assert (done.num_cached_tokens, done.num_computed_tokens) == (0, num_tokens)
        results.append((done.token_id, kv_of(on, mine.page_ids, num_tokens)))
        on.allocator.free(mine.page_ids)
    (chunked_token, chunked_kv), (whole_token, whole_kv) = results
    assert chunked_token == whole_token
    for chunked, whole in zip(chunked_kv, whole_kv, strict=True):
        assert np.abs(chunked - whole).max() < 5e-5


@pytest.mark.parametrize("num_cached_pages", [1, 3])
def test_a_cached_prefix_gives_the_same_token_and_computes_only_the_rest(
    num_cached_pages: int,
) -> None:
    on, prompt = rig("gemma3"), random_prompt(5, 70)
    cold = task(on, prompt, "cold")
    cold_done = run_prefill(on.prefill_engine(), cold)["cold"]
    fresh = on.take(len(prompt))
    pages = cold.page_ids[:num_cached_pages] + fresh[num_cached_pages:]
    warm = task(on, prompt, "warm", page_ids=pages, num_cached_tokens=num_cached_pages * PAGE)
    warm_done = run_prefill(on.prefill_engine(), warm)["warm"]
    assert warm_done.token_id == cold_done.token_id
    assert warm_done.num_computed_tokens == 70 - num_cached_pages * PAGE
    for left, right in zip(kv_of(on, cold.page_ids, 70), kv_of(on, pages, 70), strict=True):
        assert np.abs(left - right).max() < 5e-5
    on.allocator.free(cold.page_ids)
    on.allocator.free(fresh)


@pytest.mark.parametrize(
    ("num_tokens", "num_cached_pages", "send_from_page"),
    [
        (1, 0, 0),
        (16, 0, 0),
        (32, 0, 1),
        (33, 2, 0),
        (33, 0, 2),
        (80, 2, 4),
        (200, 2, 0),
        (200, 0, 4),
    ],
)
def test_d04_pieces_hold_exactly_what_the_destination_lacks_as_it_is_in_the_pool(
    num_tokens: int, num_cached_pages: int, send_from_page: int
) -> None:
    on, prompt = rig("llama3"), random_prompt(1, num_tokens)
    on.pieces.clear()
    mine = task(
        on,
        prompt,
        num_cached_tokens=num_cached_pages * PAGE,
        destination=DESTINATION,
        send_from_token=send_from_page * PAGE,
    )
    engine = PrefillEngine(
        on.functions, on.cache, on.leaves, on.pieces.append, {DESTINATION: on.wire_to(on)}
    )
    run_prefill(engine, mine)
    num_pages = -(-num_tokens // PAGE)
    sent = [
        page
        for piece in on.pieces
        for page in range(piece.page_start, piece.page_start + piece.num_pages)
    ]
    assert sent == list(range(send_from_page, num_pages))
    assert [piece.is_last for piece in on.pieces] == [False] * (len(on.pieces) - 1) + [True]
    for piece in on.pieces:
        assert piece.destination == DESTINATION and piece.attempt_id == "a"
        assert piece.num_bytes == piece.num_pages * on.cache.spec.page_bytes
        ids = mine.page_ids[piece.page_start : piece.page_start + piece.num_pages]
        for staged, layer in zip(piece.arrays, on.cache.layers, strict=True):
            assert np.array_equal(np.asarray(staged)[: len(ids)], np.asarray(layer)[list(ids)])
    on.allocator.free(mine.page_ids)


def test_pieces_leave_while_later_chunks_are_still_to_come() -> None:
    on, prompt = rig("llama3"), random_prompt(1, 3 * CHUNK)
    on.pieces.clear()
    engine = PrefillEngine(
        on.functions, on.cache, on.leaves, on.pieces.append, {DESTINATION: on.wire_to(on)}
    )
    mine = task(on, prompt, destination=DESTINATION)
    engine.add(mine)
    counts = []
    while engine.has_work:
        engine.step()
        counts.append(len(on.pieces))
    assert counts == [1, 2, 3, 3]
    on.allocator.free(mine.page_ids)


def test_a_short_prompt_overtakes_a_long_one_and_neither_changes_the_other() -> None:
    on = rig("gemma3")
    engine = on.prefill_engine()
    engine._scheduler.seconds_per_token = 1.0
    long, short = task(on, random_prompt(1, 200), "long"), task(on, random_prompt(2, 20), "short")
    alone = {
        name: run_prefill(on.prefill_engine(), one)[name].token_id
        for name, one in (("long", long), ("short", short))
    }
    engine.add(long)
    order = [done.attempt_id for done in engine.step()]
    engine.add(short)
    tokens = {}
    while engine.has_work:
        for done in engine.step():
            order.append(done.attempt_id)
            tokens[done.attempt_id] = done.token_id
    assert order == ["short", "long"]
    assert tokens == alone
    on.allocator.free(long.page_ids)
    on.allocator.free(short.page_ids)


def test_a12_the_result_of_a_removed_task_is_dropped() -> None:
    on = rig("llama3")
    engine = on.prefill_engine()
    mine = task(on, random_prompt(1, 20))
    engine.add(mine)
    assert engine.step() == []
    engine.remove("a")
    assert engine.has_work, "the chunk is on the device"
    assert engine.step() == []
    assert not engine.has_work
    engine.remove("a")

    engine.add(mine)
    engine.step()
    engine.remove("a")
    engine.add(mine)  # the same id again: the first chunk's result is not its own
    done = [one for _ in range(3) for one in engine.step()]
    assert len(done) == 1 and not engine.has_work
    on.allocator.free(mine.page_ids)


def test_a12_removal_between_chunks_stops_the_rest() -> None:
    on = rig("llama3")
    engine = on.prefill_engine()
    mine = task(on, random_prompt(1, 3 * CHUNK))
    engine.add(mine)
    engine.step()
    assert engine.num_tokens_waiting == 2 * CHUNK
    engine.remove("a")
    assert (engine.num_tasks, engine.num_tokens_waiting) == (0, 0)
    assert engine.step() == [] and not engine.has_work
    on.allocator.free(mine.page_ids)


def test_e04_the_first_token_counts() -> None:
    on, prompt = rig("llama3"), random_prompt(3, 20)

    def first(max_tokens: int = 5, min_tokens: int = 0, stop: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=min_tokens)
        mine = task(on, prompt, sampling=sampling, stop_token_ids=stop)
        done = run_prefill(on.prefill_engine(), mine)["a"]
        on.allocator.free(mine.page_ids)
        return done

    best = first().token_id
    assert first().finish_reason is None
    assert first(max_tokens=1).finish_reason == "length"
    assert first(stop=(7, best)).finish_reason == "stop"
    assert first(max_tokens=1, stop=(best,)).finish_reason == "stop"
    early = first(min_tokens=1, stop=(best,))
    assert early.finish_reason is None and early.token_id != best


def test_times_are_measured_from_where_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    on = rig("llama3")
    engine = on.prefill_engine()
    mine = task(on, random_prompt(1, 20))
    now = [100.0]
    monkeypatch.setattr(prefill_module.time, "monotonic", lambda: now[0])
    engine.add(mine)
    now[0] = 103.0
    engine.step()
    now[0] = 105.0
    (done,) = engine.step()
    assert (done.queue_seconds, done.prefill_seconds) == (3.0, 2.0)
    on.allocator.free(mine.page_ids)


def test_what_can_never_work_is_refused_when_added() -> None:
    on = rig("llama3")
    engine = on.prefill_engine()
    for fields in ({"num_cached_tokens": 20}, {"destination": "nowhere"}):
        with pytest.raises(ValueError, match="20 of 20 tokens|unknown destination nowhere"):
            engine.add(task(on, random_prompt(1, 20), page_ids=(1, 2), **fields))
    assert not engine.has_work
