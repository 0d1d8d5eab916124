"""Workloads: arrivals and lengths as they were asked for, prefixes as they should be."""

import json
from pathlib import Path

import numpy as np
import pytest

from jpd.bench.workloads import (
    FIRST_TOKEN,
    WORKLOADS,
    PlannedRequest,
    WorkloadSpec,
    at_rate,
    make_workload,
)
from jpd.errors import ConfigError


def spec(kind: str, **changes: object) -> WorkloadSpec:
    values: dict[str, object] = {"num_requests": 400, "max_len": 2048, "vocab_size": 1000}
    return WorkloadSpec(kind, **(values | changes))  # type: ignore[arg-type]


def gaps(requests: list[PlannedRequest]) -> np.ndarray:
    return np.diff([request.arrival_seconds for request in requests])


@pytest.mark.parametrize("kind", sorted(WORKLOADS.keys() - {"trace"}))
def test_a_workload_has_one_request_a_second_and_follows_from_its_seed(kind: str) -> None:
    made = make_workload(spec(kind))
    assert len(made) == 400 and made[0].arrival_seconds == 0.0
    assert made[-1].arrival_seconds == pytest.approx(399.0)
    assert made == make_workload(spec(kind)) != make_workload(spec(kind, seed=1))
    again = make_workload(spec(kind), run=1)
    for one, other in zip(made, again, strict=True):
        assert one.token_ids != other.token_ids, "a server may have kept them"
        assert (one.arrival_seconds, one.max_tokens, len(one.token_ids)) == (
            other.arrival_seconds,
            other.max_tokens,
            len(other.token_ids),
        )
    for request in made:
        assert len(request.token_ids) + request.max_tokens <= 2048
        assert FIRST_TOKEN <= min(request.token_ids) and max(request.token_ids) < 1000
    fast = at_rate(made, 4.0)
    np.testing.assert_allclose(gaps(fast) * 4.0, gaps(made))


def test_gaps_and_lengths_vary_as_asked() -> None:
    poisson, bursty = (make_workload(spec(kind)) for kind in ("poisson", "bursty"))
    assert gaps(poisson).std() == pytest.approx(1.0, abs=0.2)
    assert gaps(bursty).std() == pytest.approx(3.0, rel=0.3)
    lengths = np.array([len(request.token_ids) for request in poisson])
    assert lengths.mean() == pytest.approx(256, rel=0.1)
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.2)
    equal = make_workload(spec("poisson", spread=0.0, prompt_tokens=30, output_tokens=9))
    assert {(len(one.token_ids), one.max_tokens) for one in equal} == {(30, 9)}


def test_what_is_too_long_is_cut() -> None:
    made = make_workload(spec("poisson", max_len=64, prompt_tokens=200, output_tokens=50))
    assert {len(one.token_ids) + one.max_tokens for one in made} <= set(range(3, 65))
    assert all(one.max_tokens >= 2 for one in made)


def test_a_turn_begins_with_the_turn_before_it() -> None:
    made = make_workload(spec("sessions"))
    turns: dict[str, list[tuple[int, ...]]] = {}
    for request in made:
        assert request.session_id is not None
        turns.setdefault(request.session_id, []).append(request.token_ids)
    assert 40 <= len(turns) <= 200
    for prompts in turns.values():
        for earlier, later in zip(prompts, prompts[1:], strict=False):
            assert later[: len(earlier)] == earlier and len(later) > len(earlier)
    assert len({prompts[0][:64] for prompts in turns.values()}) == 1, "all share a beginning"


def write_trace(path: Path) -> Path:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 24, "hash_ids": [0, 1]},
        {"timestamp": 500, "input_length": 1500, "output_length": 100, "hash_ids": [0, 1, 2]},
        {"timestamp": 2000, "input_length": 4000, "output_length": 96, "hash_ids": [0, *range(7)]},
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_trace_is_scaled_by_one_factor_and_keeps_its_prefixes(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl")
    made = make_workload(spec("trace", trace=trace, max_len=512))  # 4096 -> 512
    assert [len(one.token_ids) for one in made] == [125, 188, 500]
    assert [one.max_tokens for one in made] == [3, 12, 12]
    assert made[1].token_ids[:125] == made[0].token_ids
    assert made[2].token_ids[:64] == made[0].token_ids[:64] != made[0].token_ids[64:128]
    np.testing.assert_allclose(gaps(made), [0.5, 1.5])  # one request a second on the mean


def test_a_trace_of_lengths_alone_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9805900,396,109\n"
    )
    made = make_workload(spec("trace", trace=path, num_requests=2))
    assert [(len(one.token_ids), one.max_tokens) for one in made] == [(374, 44), (396, 109)]
    assert made[0].token_ids[:64] != made[1].token_ids[:64]
    path.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,374\n")
    with pytest.raises(ConfigError, match="line 2"):
        make_workload(spec("trace", trace=path))


def test_every_wrong_number_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        spec("trace", num_requests=0, spread=-1.0, burstiness=0.0, output_tokens=1)
    told = str(raised.value)
    for name in ("--num-requests", "--spread", "--burstiness", "--output-tokens", "--trace"):
        assert name in told
    with pytest.raises(ConfigError, match="poisson, bursty"):
        spec("steady")
