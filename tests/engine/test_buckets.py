"""Bucket arithmetic by hand; no devices."""

import pytest

from jpd.config import CacheConfig, EngineConfig
from jpd.engine.buckets import MAX_EXECUTABLES, ShapeBuckets, decode_rows
from jpd.errors import ConfigError
from jpd.nn.config import LayerConfig, RopeConfig

CACHE = CacheConfig(page_size=32)


def test_defaults_for_a_long_context() -> None:
    buckets = ShapeBuckets.from_config(EngineConfig(), CACHE, 32768)
    assert buckets.prefill_lengths == (32, 128, 512)
    assert buckets.context_widths == (64, 256, 1024)
    assert buckets.page_moves == (1, 2, 4, 8, 16)
    assert buckets.max_pages == 1024
    assert buckets.prefill_layouts == ((1, 32), (1, 128), (4, 32), (4, 128))
    assert buckets.num_prefill_executables == 12 + 2 + 4 + 5
    assert buckets.num_decode_executables == 9 + 3 + 3 + 5
    assert {shape.num_steps for shape in buckets.decode_shapes(8)} == {1}


def test_defaults_for_a_context_shorter_than_a_chunk() -> None:
    buckets = ShapeBuckets.from_config(EngineConfig(), CACHE, 100)
    assert buckets.prefill_lengths == (16, 32, 128)
    assert buckets.context_widths == (4,)
    assert buckets.page_moves == (1, 2, 4)


def test_asked_for_buckets_always_get_the_chunk_and_the_longest_context() -> None:
    engine = EngineConfig(
        prefill_chunk=96, prefill_buckets=(40, 64), context_buckets=(100, 200, 5000)
    )
    buckets = ShapeBuckets.from_config(engine, CACHE, 400)
    assert buckets.prefill_lengths == (40, 64, 96)
    assert buckets.context_widths == (4, 7, 13)
    assert buckets.page_moves == (1, 2, 3)


def test_the_smallest_bucket_that_fits() -> None:
    buckets = ShapeBuckets.from_config(EngineConfig(), CACHE, 32768)
    assert [buckets.chunk_layout(n).num_tokens for n in (1, 32, 33, 512)] == [32, 32, 128, 512]
    assert [buckets.context_width(n) for n in (1, 2048, 2049, 32768)] == [64, 64, 256, 1024]
    with pytest.raises(ValueError, match="513 exceeds the largest bucket 512"):
        buckets.chunk_layout(513)


def test_rows_of_a_decode_step() -> None:
    assert [decode_rows(slots) for slots in (0, 1, 4, 8, 64)] == [
        (),
        (1,),
        (1, 4),
        (1, 2, 8),
        (4, 16, 64),
    ]


def test_several_steps_have_a_call_of_their_own() -> None:
    buckets = ShapeBuckets.from_config(EngineConfig(max_steps_per_call=4), CACHE, 32768)
    assert [shape[:3] for shape in buckets.decode_shapes(8)[:4]] == [
        (1, 64, 1),
        (1, 64, 4),
        (1, 256, 1),
        (1, 256, 4),
    ]
    assert len(buckets.decode_shapes(8)) == 2 * 9
    assert buckets.num_decode_executables == 2 * 9 + 3 + 3 + 5


def test_speculation_has_a_step_of_its_own() -> None:
    engine = EngineConfig(max_speculative_tokens=5, max_steps_per_call=4)
    buckets = ShapeBuckets.from_config(engine, CACHE, 2048)
    shapes = buckets.decode_shapes(8)
    assert {(shape.num_steps, shape.num_drafts) for shape in shapes} == {(1, 0), (4, 0), (1, 5)}
    num_widths = len(buckets.context_widths)
    assert len(shapes) == 3 * 3 * num_widths
    assert buckets.num_decode_executables == len(shapes) + 3 + 3 + len(buckets.page_moves)


FULL, SLIDING = LayerConfig(RopeConfig()), LayerConfig(RopeConfig(), sliding_window=8)


def test_layer_groups_multiply_executables_by_their_kinds_and_sizes() -> None:
    def counts(layers: list[LayerConfig], groups: int) -> tuple[int, int]:
        engine = EngineConfig(layer_groups=groups)
        buckets = ShapeBuckets.from_config(engine, CACHE, 32768, layers)
        return buckets.num_prefill_executables, buckets.num_decode_executables

    assert counts([FULL] * 6, 1) == (12 + 2 + 4 + 5, 9 + 3 + 3 + 5)
    # The embedding and the logits of each of four chunk layouts; the groups share the rest.
    assert counts([FULL] * 6, 3) == (12 + 2 * 4 + 2 + 4 + 5, 9 + 3 + 3 + 5)
    assert counts([FULL, SLIDING] * 3, 2) == (2 * 12 + 2 * 4 + 2 + 4 + 5, 9 + 3 + 3 + 5)
    # Groups of three layers and of two: pages of both sizes are moved.
    assert counts([FULL] * 5, 2) == (2 * 12 + 2 * 4 + 2 + 4 + 2 * 5, 9 + 3 + 3 + 2 * 5)


@pytest.mark.parametrize("groups", [0, 7])
def test_more_layer_groups_than_layers_are_refused(groups: int) -> None:
    with pytest.raises(ConfigError) as caught:
        ShapeBuckets.from_config(EngineConfig(layer_groups=groups), CACHE, 4096, [FULL] * 6)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("engine.layer_groups", groups)
    assert problem.rule == "must be between 1 and the model's 6 layers"


def test_too_many_kinds_of_layer_groups_are_refused_with_their_number() -> None:
    kinds = {"f": FULL, "s": SLIDING}
    layers = [kinds[letter] for letter in "fff sss fsf ssf ffs sff".replace(" ", "")]
    with pytest.raises(ConfigError) as caught:
        ShapeBuckets.from_config(EngineConfig(layer_groups=6), CACHE, 32768, layers)
    (problem,) = caught.value.problems
    assert problem.key.endswith("x kinds of layer_groups") and str(problem.value).endswith(" x 6")
    assert "use fewer buckets or other layer_groups" in problem.rule


def test_every_problem_is_told_at_once() -> None:
    engine = EngineConfig(prefill_chunk=100, prefill_buckets=(0, 200), context_buckets=(0,))
    with pytest.raises(ConfigError) as caught:
        ShapeBuckets.from_config(engine, CACHE, 1)
    assert [(problem.key, problem.value) for problem in caught.value.problems] == [
        ("engine.prefill_chunk", 100),
        ("engine.prefill_buckets", 0),
        ("engine.prefill_buckets", 200),
        ("engine.context_buckets", 0),
        ("engine.max_model_len", 1),
    ]


def test_too_many_executables_are_refused_with_both_numbers() -> None:
    engine = EngineConfig(
        prefill_buckets=tuple(range(32, 512, 32)), context_buckets=tuple(range(512, 4096, 512))
    )
    with pytest.raises(ConfigError, match=f"executables to compile, at most {MAX_EXECUTABLES}"):
        ShapeBuckets.from_config(engine, CACHE, 4096)
