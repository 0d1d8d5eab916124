"""The state machine: every transition checked, every second put down to one phase."""

import itertools

import pytest

from jpd.request import Request, RequestState, SamplingParams
from jpd.router.record import (
    TERMINAL_STATES,
    TRANSITIONS,
    IllegalTransitionError,
    RequestRecord,
    ResolvedRequest,
)

S = RequestState


def make_record(max_tokens: int = 10, min_tokens: int = 0) -> RequestRecord:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, seed=3)
    request = Request("client-id", (1, 2, 3), sampling, arrival_time=100.0, deadline=500.0)
    resolved = ResolvedRequest(request, sampling, (9,), priority=4, highest_priority=9)
    return RequestRecord(resolved, internal_id="r-0", sequence=0, phase_started=100.0)


def at(record: RequestRecord, state: RequestState) -> RequestRecord:
    record.state = state
    return record


@pytest.mark.parametrize(("start", "end"), list(itertools.product(S, S)))
def test_only_listed_transitions_are_possible(start: RequestState, end: RequestState) -> None:
    record = at(make_record(), start)
    record.sent_token_ids.append(4)
    if end in TRANSITIONS[start]:
        record.advance(end, 101.0)
        assert record.state is end
    else:
        with pytest.raises(IllegalTransitionError):
            record.advance(end, 101.0)
        assert record.state is start


@pytest.mark.parametrize("state", sorted(TERMINAL_STATES, key=str))
def test_c16_a_terminal_state_is_the_last(state: RequestState) -> None:
    assert TRANSITIONS[state] == frozenset()


@pytest.mark.parametrize("state", [s for s in S if s not in TERMINAL_STATES])
def test_every_live_state_can_be_cancelled_and_can_fail(state: RequestState) -> None:
    assert {S.CANCELLED, S.FAILED} <= TRANSITIONS[state]


def test_nothing_finishes_without_a_token() -> None:
    with pytest.raises(IllegalTransitionError):
        at(make_record(), S.DECODING).advance(S.FINISHED, 101.0)


@pytest.mark.field_report("G08")
def test_phases_partition_the_life_of_a_request() -> None:
    record = make_record()
    for state, now in [
        (S.RESERVED, 101.0),
        (S.PREFILLING, 101.5),
        (S.TRANSFERRING, 105.0),
        (S.DECODING, 113.0),
        (S.WAITING, 129.0),  # decode lost
        (S.RESERVED, 161.0),
        (S.PREFILLING, 161.0),
        (S.DECODING, 225.0),  # local: nothing travels
    ]:
        record.advance(state, now)
    record.take_tokens((4,), 225.0)
    record.advance(S.FINISHED, 353.0)
    timeline = record.timeline
    assert timeline.queue_seconds == 1.0 + 32.0
    assert timeline.prefill_seconds == 4.0 + 64.0
    assert timeline.transfer_seconds == 8.0
    assert timeline.decode_seconds == 16.0 + 128.0
    total = timeline.queue_seconds + timeline.prefill_seconds
    assert total + timeline.transfer_seconds + timeline.decode_seconds == 353.0 - 100.0


def test_kv_complete_before_the_first_token_gives_no_negative_time() -> None:
    record = at(make_record(), S.PREFILLING)
    record.advance(S.TRANSFERRING, 105.0)
    record.advance(S.DECODING, 103.0)
    assert record.timeline.transfer_seconds == 0.0
    record.take_tokens((4,), 106.0)
    record.advance(S.FINISHED, 106.0)
    assert record.timeline.decode_seconds == 1.0


def test_an_attempt_carries_what_was_sent_and_what_is_left() -> None:
    record = make_record(max_tokens=10, min_tokens=4)
    first = record.next_attempt()
    assert (first.token_ids, first.sampling.max_tokens) == ((1, 2, 3), 10)
    record.take_tokens((7, 8), 105.0)
    second = record.next_attempt()
    assert second.token_ids == (1, 2, 3, 7, 8)
    assert (second.sampling.max_tokens, second.sampling.min_tokens) == (8, 2)
    assert second.sampling.seed == 3
    assert (second.priority, second.deadline, second.stop_token_ids) == (4, 500.0, (9,))
    assert first.attempt_id != second.attempt_id
    assert "client-id" not in first.attempt_id
    record.take_tokens((1, 1, 1, 1), 106.0)
    assert record.next_attempt().sampling.min_tokens == 0


def test_ttft_and_tpot() -> None:
    record = make_record()
    record.take_tokens((4,), 102.0)
    assert (record.timeline.ttft_seconds, record.timeline.tpot_seconds) == (2.0, 0.0)
    record.take_tokens((), 103.0)
    record.take_tokens((5, 6), 106.0)
    assert (record.timeline.ttft_seconds, record.timeline.tpot_seconds) == (2.0, 2.0)
