"""Ranges of layers, and which groups are alike."""

import pytest

from jpd.nn.config import LayerConfig, MoeConfig, RopeConfig
from jpd.nn.layer_groups import LayerGroups, layer_groups, layer_ranges

FULL = LayerConfig(RopeConfig())
SLIDING = LayerConfig(RopeConfig(), sliding_window=16)
MOE = LayerConfig(RopeConfig(), moe=MoeConfig(4, 2, 8, "softmax_topk"))


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "sizes"),
    [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (61, 4, [16, 15, 15, 15]), (3, 3, [1, 1, 1])],
)
def test_groups_are_even_and_hold_every_layer_once(
    num_layers: int, num_groups: int, sizes: list[int]
) -> None:
    ranges = layer_ranges(num_layers, num_groups)
    assert [len(layers) for layers in ranges] == sizes
    assert [index for layers in ranges for index in layers] == list(range(num_layers))


@pytest.mark.parametrize("num_groups", [0, 4])
def test_no_group_is_empty(num_groups: int) -> None:
    with pytest.raises(ValueError, match=f"{num_groups} groups of 3 layers"):
        layer_ranges(3, num_groups)


@pytest.mark.parametrize(
    ("layers", "num_groups", "num_kinds", "num_sizes"),
    [
        ([FULL] * 8, 4, 1, 1),
        ([FULL] * 7, 2, 2, 2),
        ([SLIDING, FULL] * 4, 4, 1, 1),  # each group begins with the same kind
        ([SLIDING, FULL] * 3, 2, 2, 1),
        ([FULL] + [MOE] * 5, 3, 2, 1),  # the first group is dense in part, the others are alike
    ],
)
def test_groups_of_the_same_kinds_in_the_same_order_are_alike(
    layers: list[LayerConfig], num_groups: int, num_kinds: int, num_sizes: int
) -> None:
    groups = layer_groups(layers, num_groups)
    assert (groups.num_groups, groups.num_kinds) == (num_groups, num_kinds)
    assert groups.num_sizes == num_sizes
    assert not groups.is_whole


def test_one_group_is_the_whole_model() -> None:
    assert LayerGroups().is_whole and layer_groups([FULL] * 3, 1).is_whole
    assert LayerGroups().num_groups == LayerGroups().num_sizes == 1
