"""The transfer benchmark: its arithmetic against figures by hand, and that it measures."""

from pathlib import Path

import numpy as np
import pytest

from jpd.bench import transfer
from jpd.bench.engine_rig import load_model
from jpd.bench.kv_links import crossover_tokens, link_results, overlap
from jpd.bench.kv_overlap import overlap_results
from jpd.bench.wire_error import logits_of, wire_error_results
from jpd.checkpoint.model_source import open_model
from jpd.transfer.plan import LINKS, Link

SLOW, FAST = Link("slow", 1000.0, "here"), Link("fast", 1e12, "here")


def test_what_a_prompt_takes_by_hand() -> None:
    values = {result.name: result.value for result in link_results()}
    # 32 layers x 32 heads x (K and V) x 128 x 2 bytes = 0.5 MiB per token
    assert values["KV of llama-2-7b, 2K tokens"] == 1024
    assert values["KV of llama-3.1-8b, 2K tokens"] == 256
    assert values["KV of llama-3.1-70b, 32K tokens"] == 80 * 8 * 2 * 128 * 2 * 32768 / (1 << 20)
    assert values["KV of deepseek-v3, 2K tokens"] == pytest.approx(61 * 576 * 2 * 2048 / (1 << 20))
    assert values["KV of llama-2-7b, 2K tokens over PCIe 5.0 x16"] == pytest.approx(
        (1 << 30) / 64e9 * 1e3
    )


def test_what_shows_of_a_transfer_by_hand() -> None:
    # Three chunks of 10 tokens: 1 s each to compute, 0.5 s each to move.
    found = overlap(30, SLOW, token_bytes=50, token_seconds=0.1, chunk=10)
    assert (found.exposed_seconds, found.hidden_seconds) == (pytest.approx(0.5), pytest.approx(1.0))
    # Two groups halve what is left after the last one, and cost 6 calls.
    found = overlap(30, SLOW, 50, 0.1, chunk=10, groups=2, call_seconds=0.01)
    assert found.exposed_seconds == pytest.approx(0.25 + 6 * 0.01)
    # A link slower than the computation: everything waits for it, whatever the groups.
    found = overlap(30, SLOW, token_bytes=200, token_seconds=0.1, chunk=10)
    assert found.exposed_seconds == pytest.approx(1.0 + 3 * 2.0 - 3.0)
    assert overlap(5, FAST, 50, 0.1).hidden_seconds == 0.0


def test_groups_pay_where_a_link_is_slow_and_nowhere_else() -> None:
    assert crossover_tokens(FAST, 50, 0.1, groups=4) == float("inf")
    slow = crossover_tokens(Link("slow", 1e6, "here"), 50, 1e-3, groups=2)
    # Half of n x 50 bytes at 1e6 B/s against two calls of 200 us: from 16 tokens on.
    assert slow == 32.0 or slow == 16.0


@pytest.mark.slow
def test_a_pair_is_measured_beside_a_copy() -> None:
    results = transfer.pair_results(2, 4, num_runs=1)
    assert [result.unit for result in results] == ["GB/s", ""]
    assert all(result.value > 0 for result in results)
    assert results[1].target == transfer.RESHARD_TARGET


@pytest.mark.slow
def test_int8_on_the_wire_moves_logits_a_little_and_a_faithful_wire_not_at_all(repo: Path) -> None:
    model = open_model(str(repo / "tests" / "golden" / "llama3"))
    loaded = load_model(model.config, model.require_source())
    values = {result.name.partition(": ")[2]: result.value for result in wire_error_results(loaded)}
    assert 0.0 < values["max |logit difference|"] < 0.3
    assert values["greedy tokens that stay"] > 0.9
    assert values["bytes saved of bfloat16"] > 0.3
    np.testing.assert_array_equal(logits_of(loaded, "float32"), logits_of(loaded, None))


@pytest.mark.slow
def test_what_shows_behind_a_prefill_is_measured(repo: Path) -> None:
    model = open_model(str(repo / "tests" / "golden" / "llama3"))
    loaded = load_model(model.config, model.require_source())
    results = overlap_results(loaded, (64,), num_runs=1)
    values = {result.name: result.value for result in results}
    name = "64 tokens, in process, measured"
    for way in (name, f"{name}, 3 layer groups"):
        assert values[f"{way}: prefill"] > 0
        assert values[f"{way}: transfer exposed"] + values[f"{way}: transfer hidden"] > 0
    assert f"{name}: KV is whole earlier with groups by" in values
    assert values["in process, measured: 3 layer groups pay from"] in (64.0, float("inf"))
    worked_out = [name for name in values if name.startswith("from measured group times, ")]
    assert len(worked_out) == 1 + len(LINKS)
    assert {result.unit for result in results} == {"ms", "tokens"}


@pytest.mark.slow
def test_processes_are_measured() -> None:
    assert transfer._measure_process("host_staged", num_runs=1) > 0
