"""The engine's benchmark measures what it says: its floor, its formulas, its timeline."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jpd.bench import engine, host_work
from jpd.bench.ceilings import Ceilings
from jpd.bench.engine_rig import EngineRig, random_model
from jpd.bench.floor import Floor, check_plain
from jpd.bench.roofline import attention_flops
from jpd.bench.step_timeline import StepTimes
from jpd.errors import ConfigError


def test_the_floor_multiplies_every_weight_once_and_nothing_else() -> None:
    model = random_model(engine.tiny_config())
    floor = Floor(model.abstract.specs, 6, 2)
    cost: Any = floor.lower(model.leaves).compile().cost_analysis()
    matrices = [spec for spec in model.abstract.specs if len(spec.shape) > 1]
    body = sum(math.prod(spec.shape) for spec in matrices if spec.path != "embed.weight")
    table = math.prod(next(spec.shape for spec in matrices if spec.path == "embed.weight"))
    assert floor.num_flops == 2 * (6 * body + 2 * table)
    assert cost["flops"] == pytest.approx(floor.num_flops, rel=1e-3)
    numbers = np.asarray(floor(model.leaves))
    assert numbers.shape == (len(matrices),) and np.isfinite(numbers).all()


def test_the_floor_refuses_a_model_whose_weights_are_not_all_used() -> None:
    config = engine.tiny_config()
    check_plain(config, "tiny")
    mixture: Any = object()
    layers = (replace(config.layers[0], moe=mixture), *config.layers[1:])
    with pytest.raises(ConfigError, match="dense models only"):
        check_plain(replace(config, layers=layers), "tiny")


def test_attention_flops_by_hand() -> None:
    """Four tokens see 1 + 2 + 3 + 4 keys, or 1 + 2 + 2 + 2 through a window of two."""
    config = engine.tiny_config()
    whole, windowed = config.layers[0], replace(config.layers[1], sliding_window=2)
    config = replace(config, layers=(whole, windowed), num_heads=3, head_dim=5)
    assert attention_flops(config, 4) == 4 * 3 * 5 * (10 + 7)


def test_the_queue_is_empty_between_ready_and_the_next_dispatch() -> None:
    times = StepTimes(dispatched=(0.0, 1.0, 5.0), ready=(2.0, 4.0, 8.0))
    assert times.empty_seconds == 1.0  # from 4 to 5; the second step was queued before 2
    assert times.empty_share == 1.0 / 8.0


def test_every_paper_row_gets_a_token_in_a_step() -> None:
    decode = host_work.paper_engine()
    sampling = host_work.SamplingParams(temperature=0.0, max_tokens=8)
    for number in range(host_work.NUM_SLOTS):
        decode.insert(host_work.DecodeRow(str(number), (1,), 3, (5,) * 16, sampling))
    assert decode.step() == []
    done = decode.step()
    assert len(done) == host_work.NUM_SLOTS and all(len(one.token_ids) == 1 for one in done)


@pytest.mark.slow
def test_a_tiny_model_goes_through_all_that_is_measured() -> None:
    model = random_model(engine.tiny_config())
    effort = replace(engine.QUICK, rounds=1, steps=2, prompts=1)
    rig = EngineRig(model, batches=(2,), pool_tokens=2 * 640, max_model_len=640)
    limits = Ceilings("cpu", 1e11, 1e10)
    results = engine.decode_results(rig, 2, effort, limits)
    results += engine.prefill_results(rig, 16, effort, limits)
    ratios = [result for result in results if result.name.endswith("ratio")]
    assert len(ratios) == 2 and all(result.value > 0.0 for result in ratios)
    shares = [result for result in results if result.name.endswith(("MFU", "MBU"))]
    assert len(shares) == 4 and all(result.value > 0.0 for result in shares)
    with rig.functions[2].watch() as watch:
        rig.decode_seconds(2, engine.CONTEXT, 8)
    assert len(watch.times.ready) >= 8 and 0.0 <= watch.times.empty_share < 1.0
