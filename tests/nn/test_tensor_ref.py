"""TensorRef: a part of a parameter, read from a part of the file, is that part of the whole."""

import itertools

import numpy as np
import pytest

from jpd.nn.tensor_ref import Slices, TensorRef, linear, linear_from, matrix, vector


class CountingFile:
    """A tensor per name, and how many numbers were read."""

    def __init__(self, ref: TensorRef) -> None:
        rng = np.random.default_rng(0)
        self.tensors = {name: rng.normal(size=ref.file_shape) for name in ref.names}
        self.num_read = 0

    def read_slice(self, name: str, slices: Slices) -> np.ndarray:
        part = self.tensors[name][slices]
        self.num_read += part.size
        return part


STACKED = TensorRef(("e0", "e1", "e2", "e3"), (6, 4), ((6,), (4,)), (1, 0), is_stacked=True)
TAKING_TURNS = TensorRef(("x",), (4, 3, 8), ((4,), (3,), (4, 2)), (0, 1, 2), windows=((3, 1, 2),))
UPPER_PART = TensorRef(("x",), (4 * 5, 3), ((4, 5), (3,)), (0, 1, 2), windows=((1, 2, 5),))

REFS = {
    "vector": vector("x", (2, 4, 3)),
    "matrix": matrix("x", (6, 4)),
    "linear": linear("x", 5, (2, 4, 3)),
    "rows": linear("x", 5, (2, 4), first_row=3, num_rows=20),
    "one_kv_head": linear("x", 5, (1, 4, 3)),
    "linear_from": linear_from("x", (2, 4, 3), 5),
    "stacked": STACKED,
    "taking_turns": TAKING_TURNS,
    "upper_part": UPPER_PART,
}


@pytest.mark.parametrize("name", REFS)
def test_every_part_equals_that_part_of_the_whole(name: str) -> None:
    ref = REFS[name]
    file = CountingFile(ref)
    whole = ref.read(file.read_slice)
    assert whole.shape == ref.shape
    halves = [[(0, dim), (0, (dim + 1) // 2), (dim // 2, dim)] for dim in ref.shape]
    for bounds in itertools.product(*halves):
        index = tuple(slice(low, high) for low, high in bounds)
        np.testing.assert_array_equal(ref.read(file.read_slice, index), whole[index])


def test_the_whole_is_what_the_names_say() -> None:
    ref = REFS["linear"]
    file = CountingFile(ref)
    want = file.tensors["x"].T.reshape(5, 2, 4, 3)
    np.testing.assert_array_equal(ref.read(file.read_slice), want)
    file = CountingFile(TAKING_TURNS)
    np.testing.assert_array_equal(TAKING_TURNS.read(file.read_slice), file.tensors["x"][..., 1::2])
    file = CountingFile(UPPER_PART)
    want = file.tensors["x"].reshape(4, 5, 3)[:, 2:]
    np.testing.assert_array_equal(UPPER_PART.read(file.read_slice), want)
    file = CountingFile(STACKED)
    want = np.stack([tensor.T for tensor in file.tensors.values()])
    np.testing.assert_array_equal(STACKED.read(file.read_slice), want)


@pytest.mark.parametrize(
    ("name", "index", "share"),
    [
        ("linear", (slice(None), slice(1, 2), slice(None), slice(None)), 2),  # one kv head of two
        ("one_kv_head", (slice(None), slice(None), slice(2, 4), slice(None)), 2),  # half its group
        ("linear_from", (slice(1, 2), slice(2, 4), slice(None), slice(None)), 4),
        ("stacked", (slice(2, 3), slice(None), slice(0, 3)), 8),  # one expert, half its columns
        ("matrix", (slice(0, 3), slice(None)), 2),
    ],
)
def test_a_shard_reads_only_its_share(name: str, index: Slices, share: int) -> None:
    ref = REFS[name]
    file = CountingFile(ref)
    ref.read(file.read_slice, index)
    total = len(ref.names) * int(np.prod(ref.file_shape))
    assert file.num_read == total // share
