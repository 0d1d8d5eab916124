"""Spans of requests, and the lanes they are drawn in."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jpd.request import RequestState, Timeline
from jpd.router.record import PhaseSpan
from jpd.router.trace import MAX_SPANS_PER_REQUEST, RequestTrace, TraceLog, chrome_trace
from tests.router.rig import rig
from tests.router.virtual_time import virtual
from tests.support.fake_worker import FakeWorker


def drawn(log: list[RequestTrace]) -> list[tuple[str, int, str, float, float]]:
    """Lane, row, phase, start and end in seconds."""
    events: Any = chrome_trace(log)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return [
        (names[e["pid"]], e["tid"], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    ]


@virtual
async def test_a_request_has_its_phases_where_they_were() -> None:
    workers = (
        FakeWorker("prefill-0", "prefill", prefill_token_seconds=0.3),
        FakeWorker("decode-0", "decode", step_seconds=0.5, transfer_seconds=1.0),
    )
    async with rig(*workers) as made:
        start = made.now
        answer = await made.ask(made.request(max_tokens=5))
        [trace] = made.router.trace.requests()
    assert trace.state is RequestState.FINISHED and trace.num_output_tokens == 5
    spans = [(span.phase, span.worker) for span in trace.spans]
    assert spans == [
        ("prefill", "prefill-0"),
        ("transfer", "decode-0"),
        ("decode", "decode-0"),
    ]
    assert answer.timeline is not None
    for span in trace.spans:
        seconds = getattr(answer.timeline, f"{span.phase}_seconds")
        assert span.end - span.start == pytest.approx(seconds)
    assert trace.spans[0].start == pytest.approx(start)


@virtual
async def test_a_retry_shows_both_workers_and_a_cancelled_request_its_part() -> None:
    workers = (
        FakeWorker("prefill-0", "prefill", prefill_token_seconds=0.3),
        FakeWorker("prefill-1", "prefill", prefill_token_seconds=0.3),
        FakeWorker("decode-0", "decode", step_seconds=0.5),
    )
    async with rig(*workers) as made:
        running = made.begin(made.request(max_tokens=5))
        await asyncio.sleep(0.5)
        first = next(name for name in ("prefill-0", "prefill-1") if made[name].num_held)
        made[first].die()
        await running
        del made.workers[first]
        [trace] = made.router.trace.requests()
    tried = [span.worker for span in trace.spans if span.phase == "prefill"]
    assert len(tried) == 2 and tried[0] == first and len(set(tried)) == 2


def test_spans_that_overlap_are_in_rows_of_their_lane() -> None:
    def trace(start: float, end: float) -> RequestTrace:
        span = PhaseSpan("decode", "d", start, end)
        return RequestTrace("r", RequestState.FINISHED, 1, 1, (span,))

    rows = [(row, s, e) for _, row, _, s, e in drawn([trace(0, 4), trace(1, 2), trace(2, 3)])]
    assert rows == [(1, 0, 4), (2, 1, 2), (2, 2, 3)]


@virtual
async def test_a_look_shows_what_runs_and_what_has_ended_since() -> None:
    workers = (
        FakeWorker("prefill-0", "prefill", prefill_token_seconds=0.3),
        FakeWorker("decode-0", "decode", step_seconds=0.5, slots=1),
    )
    async with rig(*workers) as made:
        start = made.now
        answers = [made.begin(made.request(max_tokens=3)), made.begin(made.request(max_tokens=3))]
        await asyncio.sleep(0.5)
        look = made.router.activity(since=start)
        first, second = look.running
        assert (look.now, look.num_waiting, look.ended) == (start + 0.5, 1, ())
        assert first.spans == (PhaseSpan("prefill", "prefill-0", start, start + 0.5),)
        assert second.spans == (PhaseSpan("queue", "", start, start + 0.5),)
        prefill, decode = look.workers
        assert (prefill.num_prefills, decode.num_rows, decode.num_slots) == (1, 1, 1)
        await asyncio.gather(*answers)
        look = made.router.activity(since=start)
        assert [trace.request_id for trace in look.ended] == [first.request_id, second.request_id]
        assert look.ended[0].ttft_seconds == pytest.approx(0.9)
        assert look.ended[0].tpot_seconds == pytest.approx(0.5)
        assert not look.running and not look.is_draining
        assert made.router.activity(since=look.ended[0].end).ended == look.ended[1:]


def test_memory_is_bounded() -> None:
    log = TraceLog(max_requests=3)
    for number in range(5):
        record: Any = SimpleNamespace(  # what it reads of a record
            request=SimpleNamespace(request_id=str(number), num_prompt_tokens=1),
            state=RequestState.FINISHED,
            is_live=False,
            phase_started=100.0 + number,
            timeline=Timeline(),
            sent_token_ids=[],
            spans_until=lambda now: [PhaseSpan("queue", "", t, t + 1.0) for t in range(100)],
        )
        log.note(record)
    assert [trace.request_id for trace in log.requests()] == ["2", "3", "4"]
    assert {len(trace.spans) for trace in log.requests()} == {MAX_SPANS_PER_REQUEST}
    assert len(drawn(list(log.requests()))) == 3 * MAX_SPANS_PER_REQUEST
