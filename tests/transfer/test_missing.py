"""What an attempt still lacks, however its KV is cut and in whatever order it comes."""

import random

import pytest

from jpd.transfer.missing import MissingKV
from jpd.transfer.protocol import PieceRange

NUM_LAYERS = 5
PAGES = range(3, 11)


def piece(layers: range, pages: range) -> PieceRange:
    return PieceRange("a", layers.start, len(layers), pages.start, len(pages))


def cut(draw: random.Random, whole: range) -> list[range]:
    """A range in parts."""
    ends = sorted(
        {*draw.sample(whole, draw.randint(0, len(whole) - 1)), whole.stop} - {whole.start}
    )
    return [range(start, end) for start, end in zip([whole.start, *ends], ends, strict=False)]


@pytest.mark.parametrize("seed", range(20))
def test_every_cut_in_every_order_is_whole_with_its_last_piece(seed: int) -> None:
    draw = random.Random(seed)
    pieces = [
        piece(layers, pages)
        for pages in cut(draw, PAGES)
        for layers in cut(draw, range(NUM_LAYERS))  # each run of pages has its own
    ]
    draw.shuffle(pieces)
    missing = MissingKV(PAGES, NUM_LAYERS)
    for number, one in enumerate(pieces):
        assert missing.covers(one)
        missing.take(one)
        assert not missing.covers(one), "it is taken once"
        assert missing.is_nothing == (number == len(pieces) - 1)
    assert missing.num_pages == 0


def test_a_page_is_missing_until_its_last_layer_is_here() -> None:
    missing = MissingKV(PAGES, NUM_LAYERS)
    missing.take(piece(range(4), PAGES))
    assert missing.num_pages == len(PAGES)
    missing.take(piece(range(4, 5), range(3, 5)))
    assert missing.num_pages == len(PAGES) - 2


@pytest.mark.parametrize(
    "other",
    [
        piece(range(NUM_LAYERS), range(2, 4)),  # a page that nobody waits for
        piece(range(NUM_LAYERS), range(10, 12)),
        piece(range(2, 4), range(5, 6)),  # one of the two layers is here
        piece(range(4, 6), range(3, 4)),  # a layer that the model has not
        piece(range(NUM_LAYERS), range(3, 3)),  # nothing
    ],
)
def test_what_is_not_missing_as_a_whole_is_not_covered(other: PieceRange) -> None:
    missing = MissingKV(PAGES, NUM_LAYERS)
    missing.take(piece(range(3, 5), range(5, 6)))
    assert not missing.covers(other)


def test_nothing_is_missing_once_it_is_cleared() -> None:
    missing = MissingKV(PAGES, NUM_LAYERS)
    missing.clear()
    assert missing.is_nothing and MissingKV(range(3, 3), NUM_LAYERS).is_nothing
