"""Weights out of Python packages: assembled once, whole or not at all, never a wrong file."""

import hashlib
import sys
import types
from pathlib import Path

import pytest

from jpd.checkpoint.package_weights import (
    CACHE_VARIABLE,
    assembled_weights,
    cache_folder,
    is_installed,
)
from jpd.errors import ConfigError

CONTENT = b"GGUF and so on"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class FakePackage(types.ModuleType):
    """A package in the manner of those that carry models."""

    MODEL_NAME = "tiny.gguf"

    def __init__(self) -> None:
        super().__init__("fake_model_package")
        self.num_assembled = 0
        self.content = CONTENT

    def assemble(self, path: Path, overwrite: bool) -> Path:
        assert overwrite
        self.num_assembled += 1
        path.write_bytes(self.content[:5])
        if len(self.content) < 5:
            raise ValueError("a part is missing")
        path.write_bytes(self.content)
        return path


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return fake


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_assembled_once_then_reused(package: FakePackage, tmp_path: Path) -> None:
    first = assembled_weights(package.__name__, SHA256, tmp_path)
    assert first == tmp_path / "models" / "tiny.gguf"
    assert assembled_weights(package.__name__, SHA256, tmp_path) == first
    assert package.num_assembled == 1
    assert first.read_bytes() == CONTENT
    assert files(tmp_path) == ["models", "tiny.gguf"]


def test_a_spoiled_file_is_assembled_again(package: FakePackage, tmp_path: Path) -> None:
    path = assembled_weights(package.__name__, SHA256, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert assembled_weights(package.__name__, SHA256, tmp_path).read_bytes() == CONTENT
    assert package.num_assembled == 2


@pytest.mark.parametrize("content", [b"something else", b"bad"])
def test_a_wrong_package_is_refused_and_leaves_nothing(
    package: FakePackage, tmp_path: Path, content: bytes
) -> None:
    package.content = content
    with pytest.raises(ConfigError, match="fake_model_package"):
        assembled_weights(package.__name__, SHA256, tmp_path)
    assert files(tmp_path) == ["models"]


def test_the_cache_folder_can_be_chosen() -> None:
    assert cache_folder({CACHE_VARIABLE: "/somewhere"}) == Path("/somewhere")
    assert cache_folder({}) == Path.home() / ".cache" / "jpd"
    assert not is_installed("no_such_package_anywhere")
