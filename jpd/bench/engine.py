"""`jpd bench engine`: how far the two engines are from what their matrix products alone take.

1. Decode steps and prompts, as served, against the floor, by turns (`jpd.bench.floor`), and
   against what the machine reaches at best (`jpd.bench.roofline`).
2. What parts of them cost alone; how a step grows with batch and context.
3. When the device waits for the host (`jpd.bench.step_timeline`), and what the host does.
Prefill's floor has the arithmetic of attention added by formula: see `attention_flops`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jpd.bench import ceilings, host_work
from jpd.bench.ceilings import Ceilings
from jpd.bench.engine_rig import EngineRig, load_model, random_model
from jpd.bench.floor import Floor, check_plain
from jpd.bench.results import Result
from jpd.bench.roofline import ModelWork, attention_flops, roofline_results
from jpd.bench.step_parts import AttentionPart, choosing_part
from jpd.checkpoint.model_source import Model
from jpd.nn.config import DecoderConfig
from jpd.nn.families import config_from_hf

BATCHES = (1, 8, 32)
CONTEXT = 512
PROMPTS = (512, 2048)
MAX_MODEL_LEN = 2048
RATIO_TARGET = 1.25
GROWTH_BATCHES = (1, 8)
POOL_TOKENS = max(BATCHES) * (CONTEXT + 128)
EMPTY_QUEUE_BATCH = 8
EMPTY_QUEUE_TARGET = 5.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How often things are measured."""

    rounds: int  # alternations of floor and engine; medians are over these
    steps: int  # decode steps in a round
    prompts: int  # alternations of floor and prompt
    timeline_steps: int
    growth_contexts: tuple[int, ...]


FULL = Effort(
    rounds=9,
    steps=6,
    prompts=5,
    timeline_steps=300,
    growth_contexts=(128, 512, 1024, 1792),
)
QUICK = Effort(
    rounds=3,
    steps=3,
    prompts=2,
    timeline_steps=100,
    growth_contexts=(128, 1792),
)


def run(model: Model, *, is_quick: bool = False) -> list[Result]:
    """Everything, on the first device, in float32. Raises ConfigError for a model it cannot."""
    check_plain(model.config, model.name)
    effort = QUICK if is_quick else FULL
    loaded = load_model(model.config, model.require_source())
    rig = EngineRig(loaded, batches=BATCHES, pool_tokens=POOL_TOKENS, max_model_len=MAX_MODEL_LEN)
    limits = ceilings.measure()
    results = limits.results()
    for batch in BATCHES:
        results += decode_results(rig, batch, effort, limits)
    for length in PROMPTS:
        results += prefill_results(rig, length, effort, limits)
    results += growth_results(rig, effort)
    results.append(empty_queue_result(effort))
    return results + host_work.run()


def decode_results(rig: EngineRig, batch: int, effort: Effort, limits: Ceilings) -> list[Result]:
    floor = Floor(rig.model.abstract.specs, batch, batch)
    rig.decode_seconds(batch, CONTEXT, 1)

    def step() -> float:
        return rig.decode_seconds(batch, CONTEXT, effort.steps)

    def bare() -> float:
        return seconds_of(lambda: floor(rig.model.leaves), effort.steps)

    bare_seconds, step_seconds = by_turns(bare, step, effort.rounds)
    name = f"decode step, batch {batch}, {CONTEXT} tokens each"
    results = _ratio_results(name, "bare products", bare_seconds, step_seconds)
    work = ModelWork(rig.model.config).decode(batch, CONTEXT)
    results += roofline_results(name, work, statistics.median(step_seconds), limits)
    attention = AttentionPart(rig, batch, 1, CONTEXT)
    parts: dict[str, Callable[[], object]] = {
        "attention": attention,
        "choosing tokens": choosing_part(rig, batch),
    }
    return results + [_part_result(name, part, run, effort) for part, run in parts.items()]


def prefill_results(
    rig: EngineRig, num_tokens: int, effort: Effort, limits: Ceilings
) -> list[Result]:
    floor = Floor(rig.model.abstract.specs, num_tokens, 1)
    share = attention_flops(rig.model.config, num_tokens) / floor.num_flops
    rig.prefill_seconds(num_tokens)

    def bare() -> float:
        return seconds_of(lambda: floor(rig.model.leaves), 1) * (1.0 + share)

    bare_seconds, seconds = by_turns(bare, lambda: rig.prefill_seconds(num_tokens), effort.prompts)
    name = f"prefill of {num_tokens} tokens"
    floor_name = f"bare products + {share:.0%} for attention"
    results = _ratio_results(name, floor_name, bare_seconds, seconds)
    work = ModelWork(rig.model.config).prefill(num_tokens, rig.buckets.prefill_chunk)
    results += roofline_results(name, work, statistics.median(seconds), limits)
    if num_tokens > rig.buckets.prefill_chunk:
        return results
    attention = AttentionPart(rig, 1, num_tokens, 0)
    return [*results, _part_result(name, "attention", attention, effort)]


def by_turns(
    bare: Callable[[], float], measured: Callable[[], float], num_rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of both, one after the other, so that a busy machine slows both."""
    bare()
    pairs = [(bare(), measured()) for _ in range(num_rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def seconds_of(dispatch: Callable[[], object], num_times: int) -> float:
    """Of one, of several one after the other."""
    start = time.perf_counter()
    for _ in range(num_times):
        jax.block_until_ready(dispatch())
    return (time.perf_counter() - start) / num_times


def _ratio_results(
    name: str, floor_name: str, bare: Sequence[float], measured: Sequence[float]
) -> list[Result]:
    """The ratio is the median of the rounds' ratios."""
    ratio = statistics.median(m / b for b, m in zip(bare, measured, strict=True))
    return [
        Result(f"{name}", statistics.median(measured) * 1000, "ms"),
        Result(f"{name}: {floor_name}", statistics.median(bare) * 1000, "ms"),
        Result(f"{name}: ratio", ratio, "x", RATIO_TARGET),
    ]


def _part_result(name: str, part: str, run: Callable[[], object], effort: Effort) -> Result:
    """The median time of a part alone."""
    jax.block_until_ready(run())
    found = [seconds_of(run, 1) for _ in range(effort.rounds)]
    return Result(f"{name}: {part} alone", statistics.median(found) * 1000, "ms")


def growth_results(rig: EngineRig, effort: Effort) -> list[Result]:
    """Step time fitted by least squares: a + b · batch + c · batch · context."""
    points = [(batch, context) for batch in GROWTH_BATCHES for context in effort.growth_contexts]
    points.append((max(BATCHES), CONTEXT))
    milliseconds = []
    for batch, context in points:
        rig.decode_seconds(batch, context, 1)
        found = [rig.decode_seconds(batch, context, effort.steps) for _ in range(effort.prompts)]
        milliseconds.append(statistics.median(found) * 1000)
    columns = np.array([(1.0, batch, batch * context / 1000) for batch, context in points])
    fit, *_ = np.linalg.lstsq(columns, np.array(milliseconds), rcond=None)
    error = np.abs(columns @ fit / milliseconds - 1.0).max() * 100
    return [
        Result("decode step = a + b · rows + c · cached tokens: a", float(fit[0]), "ms"),
        Result("decode step = ...: b", float(fit[1]), "ms per row"),
        Result("decode step = ...: c", float(fit[2]), "ms per 1000 tokens"),
        Result("decode step = ...: largest error of the fit", float(error), "%"),
    ]


def empty_queue_result(effort: Effort) -> Result:
    """See `jpd.bench.step_timeline`; on a model so small that the host has most to say."""
    rig = EngineRig(
        random_model(tiny_config()),
        batches=(EMPTY_QUEUE_BATCH,),
        pool_tokens=EMPTY_QUEUE_BATCH * MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
    )
    rig.decode_seconds(EMPTY_QUEUE_BATCH, CONTEXT, 4)
    with rig.functions[EMPTY_QUEUE_BATCH].watch() as watch:
        rig.decode_seconds(EMPTY_QUEUE_BATCH, CONTEXT, effort.timeline_steps)
    times = watch.times
    name = f"tiny model, batch {EMPTY_QUEUE_BATCH}: device queue empty"
    return Result(name, times.empty_share * 100, "% of wall time", EMPTY_QUEUE_TARGET)


def tiny_config() -> DecoderConfig:
    return config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 2048,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
        }
    )
