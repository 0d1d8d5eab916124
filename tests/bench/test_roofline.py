"""The least work of a step, by hand, and what of the ceilings it reaches."""

from dataclasses import replace

import pytest

from jpd.bench import ceilings, engine
from jpd.bench.ceilings import Ceilings
from jpd.bench.latency import Outcome
from jpd.bench.roofline import ModelWork, Work, attention_flops, load_roofline, roofline_results

CONFIG = engine.tiny_config()  # 4 layers, 128 wide, mlp 384, 4 heads of 32, 2 kv heads, vocab 2048
LAYER = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128 + 3 * 128 * 384
BODY, HEAD = 4 * LAYER, 2048 * 128
KV = 4 * 2 * 64 * 4  # bytes of a token: layers, kv heads, K and V of 32, float32


def test_a_decode_step_reads_its_weights_once_and_the_cache_of_every_row() -> None:
    work = ModelWork(CONFIG).decode(batch=3, context=10)
    assert work.flops == 3 * (2 * (BODY + HEAD) + 4 * 10 * 4 * 4 * 32)
    assert work.num_bytes == 4 * (BODY + HEAD) + 3 * 10 * KV
    half = ModelWork(CONFIG, "bfloat16").decode(batch=3, context=10)
    assert half.num_bytes == work.num_bytes / 2 and half.flops == work.flops


def test_a_prompt_reads_its_weights_once_a_chunk() -> None:
    model = ModelWork(CONFIG)
    whole, chunked = model.prefill(6), model.prefill(6, chunk=2)
    assert whole.flops == chunked.flops == 2 * (6 * BODY + HEAD) + attention_flops(CONFIG, 6)
    assert whole.num_bytes == 4 * (BODY + HEAD) + 6 * KV
    assert chunked.num_bytes == 4 * (3 * BODY + HEAD) + (2 + 4 + 6) * KV


def test_a_window_bounds_what_a_query_sees() -> None:
    layers = tuple(replace(layer, sliding_window=5) for layer in CONFIG.layers)
    windowed = ModelWork(replace(CONFIG, layers=layers))
    assert windowed.decode(1, 100) == ModelWork(CONFIG).decode(1, 5)


def test_fractions_of_the_ceilings() -> None:
    found = roofline_results("step", Work(50.0, 30.0), 0.5, Ceilings("x", 1000.0, 100.0))
    values = {result.name: result.value for result in found}
    assert values["step: MFU"] == pytest.approx(10.0)
    assert values["step: MBU"] == pytest.approx(60.0)


def test_a_load_counts_prompts_and_steps_that_rows_share() -> None:
    """Two answers of 11 tokens side by side: ten steps of two rows, two prompts."""
    times = tuple(1.0 + 0.1 * number for number in range(11))
    outcomes = [Outcome(0.0, 0.0, times, 20, 11, times[-1]) for _ in range(2)]
    model, limit = ModelWork(CONFIG), Ceilings("x", 1e9, 1e9)
    work = model.prefill(20).times(2) + model.decode(2, 25.5).times(10)
    values = {result.name: result.value for result in load_roofline("l", model, outcomes, limit)}
    assert values["l: MFU"] == pytest.approx(work.flops / 2.0 / 1e9 * 100)
    assert values["l: MBU"] == pytest.approx(work.num_bytes / 2.0 / 1e9 * 100)
    weights = values["l: MBU of a decode step, its weights alone, at TPOT p50"]
    assert weights == pytest.approx(4 * (BODY + HEAD) / 0.1 / 1e9 * 100)
    assert load_roofline("l", model, [Outcome(0.0, 0.0, error="no")], limit) == []


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "PRODUCT_SIDE", 64)
    monkeypatch.setattr(ceilings, "ARRAY_BYTES", 1 << 20)
    found = ceilings.measure()
    assert found.device == "cpu" and found.flops_per_second > 0 and found.bytes_per_second > 0
