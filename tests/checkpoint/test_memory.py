"""Host memory of converting and loading: about one tensor, whatever the size of the checkpoint."""

import sys
from pathlib import Path

import pytest

from jpd.bench.convert import Shape, memory_growth, write_checkpoint

MANY_SMALL = Shape(num_layers=16, embed_dim=512, mlp_dim=4096, vocab_size=512)
"""About 450 MiB, most of it in tensors of 8 MiB."""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "source"
    assert write_checkpoint(folder, MANY_SMALL) > 400 * 2**20
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["convert", "load"])
def test_memory_is_that_of_a_few_tensors(large_checkpoint: Path, tmp_path: Path, what: str) -> None:
    grown_mib = memory_growth(large_checkpoint, tmp_path / "out", what) / 2**20
    print(f"{what}: {grown_mib:.0f} MiB")
    assert grown_mib < 100
